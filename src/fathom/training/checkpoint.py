"""Checkpoints that survive crashes: written under a temporary name, with checksums, renamed into place.

`step-000200/` holds safetensors files written by torch.distributed.checkpoint (each rank its shards; no pickle
anywhere), `trainer.json`, `recipe.yaml` and `manifest.json` with the size and SHA-256 of all of them. Every file and
directory is fsynced before the rename, and `latest` is updated after it. A directory named `step-*` was therefore
complete once, and the manifest shows whether it still is.

`loop.py` refuses a run directory that holds a run of another recipe, and says what to do if it has no checkpoint; it
refuses to resume with another corpus or teacher. `checkpoints/runs.py` chooses the newest checkpoint that is intact and
reads tensors, for any strategy and number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from fathom.checkpoints.file_names import LATEST, MANIFEST, MODEL, RECIPE, TRAINER, step_name
from fathom.checkpoints.find import checkpoint_steps
from fathom.checkpoints.runs import Saved, newest_checkpoint, reason
from fathom.errors import TrainingError
from fathom.report.files import Digest, asdict, digest, sync_directory, write_atomically, write_durably
from fathom.report.results import read_result
from fathom.training.parallel import Ranks, host_group
from fathom.training.results import TrainerState

UNFINISHED = ".unfinished-"
REPLACED = ".replaced-"
LEFT_BY_A_KILL = (f"{UNFINISHED}*", f"{REPLACED}*", f".{MODEL}-*")
"""Directories that a killed process may leave in a run: half-written or half-deleted checkpoints and exports."""
FILE_BYTES = 2 << 30  # files are serialised in memory first


class Checkpointer:
    """Writes, finds and prunes the checkpoints of one run directory. Every rank must make the same calls."""

    def __init__(
        self,
        run_dir: Path,
        ranks: Ranks,
        keep_last: int,
        asynchronous: bool = True,
        say: Callable[[str], None] = print,
    ) -> None:
        self.run_dir = run_dir
        self.ranks = ranks
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.say = say
        self.group = host_group("checkpoint") if ranks.world_size > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fathom-checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = 0
        self._succeeded = True

    def save(self, tensors: Mapping[str, Tensor], trainer: TrainerState, recipe: str) -> None:
        """Write a checkpoint, in the background if `asynchronous`. Tensors are copied before this returns.

        If it fails, only this checkpoint is lost: the error is reported and its files are removed.
        """
        self.wait()
        temporary = self.run_dir / f"{UNFINISHED}{step_name(trainer.step)}"
        if self.ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
        self.ranks.barrier()
        self._pending_step = trainer.step
        writing = self._write(temporary, dict(tensors))
        self._pending = self._thread.submit(self._finish, writing, temporary, trainer, recipe)
        if not self.asynchronous:
            self.wait()

    @property
    def written(self) -> bool:
        """Whether this rank has finished writing; `wait` then only waits for the other ranks."""
        return self._pending is None or self._pending.done()

    def wait(self) -> bool:
        """Wait for a save under way; returns whether the last one succeeded on every rank."""
        if self._pending is None:
            return self._succeeded
        pending, self._pending = self._pending, None
        try:
            pending.result()
            problem = ""
        except (Exception, CheckpointException) as error:  # KeyboardInterrupt is a BaseException
            problem = reason(error)
        self._succeeded = not self.ranks.any(bool(problem))
        if not self._succeeded:
            shutil.rmtree(self.run_dir / f"{UNFINISHED}{step_name(self._pending_step)}", ignore_errors=True)
        if problem:
            kept = self.steps()
            previous = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no earlier one"
            self.say(f"checkpoint of step {self._pending_step} was not saved: {problem}; {previous}")
        return self._succeeded

    def close(self) -> None:
        """Finish the save under way."""
        self.wait()
        self._thread.shutdown()

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending, whether the checkpoint is intact or damaged."""
        return checkpoint_steps(self.run_dir)

    def newest(self) -> Saved | None:
        """The newest intact checkpoint; damaged ones are reported and skipped."""
        found: Saved | None = None
        if self.ranks.first:
            for path in (path for pattern in LEFT_BY_A_KILL for path in self.run_dir.glob(pattern)):
                shutil.rmtree(path, ignore_errors=True)
            found = newest_checkpoint(self.run_dir, self.say)
        shared: Saved | None = self.ranks.share(found)
        return shared

    def _write(self, directory: Path, tensors: dict[str, Tensor]) -> Future[None]:
        """Start writing tensors; the caller may change the tensors once this method returns."""
        writer = dcp.HuggingFaceStorageWriter(
            str(directory), fqn_to_index_mapping=_files(tensors), save_distributed=True, thread_count=1
        )
        alone = not dist.is_initialized()
        answer = dcp.async_save(tensors, storage_writer=writer, process_group=self.group, no_dist=alone)
        return answer if isinstance(answer, Future) else answer.upload_completion

    def _finish(self, writing: Future[None], temporary: Path, trainer: TrainerState, recipe: str) -> None:
        """In the saving thread: once the tensors are written, add the other files and rename the directory."""
        writing.result()
        step = trainer.step
        sums = self._checksums(temporary)
        if self.ranks.first:
            # A hook gets back what it gave, infinities included: the best loss so far begins as one.
            state = {**asdict(trainer), "hooks": trainer.hooks}
            for file, text in ((RECIPE, recipe), (TRAINER, json.dumps(state, indent=2))):
                write_durably(temporary / file, text)
                sums[file] = digest(temporary / file)
            write_durably(temporary / MANIFEST, json.dumps(asdict({"files": sums}), indent=2))
            publish(temporary, self.run_dir / step_name(step))
            write_atomically(self.run_dir / LATEST, step_name(step) + "\n")
            # Later checkpoints than this one are damaged, and stay.
            for old in [s for s in self.steps() if s <= step][: -self.keep_last]:
                discard(self.run_dir / step_name(old))

    def _checksums(self, directory: Path) -> dict[str, Digest]:
        """Size and checksum of every file written so far; the ranks share the work, and all ranks fail if one fails."""
        files = sorted(path for path in directory.iterdir() if path.is_file())
        mine: dict[str, Digest] | str
        try:
            mine = {path.name: digest(path) for path in files[self.ranks.rank :: self.ranks.world_size]}
        except OSError as error:
            mine = reason(error)
        parts = [mine]
        if self.group is not None:
            parts = [{}] * self.ranks.world_size
            dist.all_gather_object(parts, mine, group=self.group)
        for problem in (part for part in parts if isinstance(part, str)):
            raise TrainingError(problem)
        return {file: entry for part in parts if not isinstance(part, str) for file, entry in part.items()}


def trainer_state(saved: Saved) -> TrainerState:
    """The contents of a checkpoint's `trainer.json`."""
    return read_result(TrainerState, saved.directory / TRAINER, "delete the checkpoint, and the one before is taken")


def discard(directory: Path) -> None:
    """Delete a directory after renaming it, so that a half-deleted one is not mistaken for a checkpoint."""
    doomed = directory.with_name(REPLACED + directory.name)
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(directory, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Rename a finished directory to its final name; an earlier directory of that name is deleted."""
    sync_directory(temporary)
    if final.exists():
        discard(final)
    os.replace(temporary, final)
    sync_directory(final.parent)


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file that each tensor is written to; the numbers are the same on every rank."""
    answer, index, size = {}, 1, 0
    for key, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        if size > FILE_BYTES:
            index, size = index + 1, 0
        answer[key] = index
    return answer
