"""transformers' continuous batching, with a cache layer for every visit."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from transformers.generation import GenerationMixin

from .engines import check_engine, engine_config
from .slots import plan


class BatchedGenerationMixin(GenerationMixin):
    """`generate_batch` for models whose trips have their own banks."""

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """See transformers; the cache has a layer for every visit, and unsupported models are refused."""
        visits = plan(self.config, self.model._trips(None))
        told = engine_config(self.config, visits)
        check_engine(self.config, self.model.recurrence, visits, {"cache": SimpleNamespace(config=told)})
        # The engine gets this model's modules with a configuration that has a layer for each visit.
        engine = self.__dict__.pop("_engine", None) or copy.copy(self)
        engine.__dict__.update(self.__dict__, config=told)
        self.__dict__["_engine"] = engine
        return GenerationMixin.init_continuous_batching(engine, *args, **kwargs)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """See transformers."""
        if engine := self.__dict__.pop("_engine", None):
            GenerationMixin.destroy_cached_continuous_batching_manager(engine)
