"""Where a result comes from: command, date, commit, hardware, versions."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from fathom._version import __version__
from fathom.report.results import read_result

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy")


@dataclass
class Provenance:
    """Where a report comes from, as it is stored in the report."""

    command: str
    date: str
    commit: str | None
    """The commit of the checkout that the code ran from; None outside a checkout."""
    hardware: dict[str, object]
    versions: dict[str, str]

    def facts(self) -> dict[str, str]:
        """The provenance as text, by heading."""
        return {
            "command": self.command,
            "date": self.date.replace("T", " ").replace("+00:00", " UTC"),
            "commit": self.commit or "not in a checkout",
            "hardware": machine(self.hardware),
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }


def provenance() -> Provenance:
    """The provenance of a report made now, by this process."""
    command = " ".join([Path(sys.argv[0]).name, *map(shlex.quote, sys.argv[1:])])
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Provenance(command, now, commit(), hardware(), versions())


def recorded(path: Path) -> Provenance:
    """The provenance stored in an earlier report's file, or if there is no such file, the provenance of a report made
    now."""
    if not path.exists():
        return provenance()
    return read_result(Provenance, path, "delete it to use this machine and time instead")


def machine(hardware: Mapping[str, object]) -> str:
    """A machine in words."""
    named = ", ".join(str(hardware[key]) for key in ("gpu", "cpu") if key in hardware)
    count = hardware["cores"]
    return f"{named}, {count} {'core' if count == 1 else 'cores'}, {hardware['system']}"


def commit() -> str | None:
    """The commit of the checkout that this code runs from, marked if it has uncommitted changes; None outside a
    checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], cwd=here, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and tracked.returncode == 0 else None


def hardware() -> dict[str, object]:
    """The processor, and the accelerator if there is one."""
    found: dict[str, object] = {"cpu": _cpu(), "cores": cores(), "system": f"{platform.system()} {platform.machine()}"}
    import torch  # slow to import, and not needed to rewrite a page

    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python, Fathom and those of the given packages that are installed; by default, of packages that
    do the numerical work."""
    found = {"python": platform.python_version(), "fathom": __version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
