"""transformers' continuous batching: the engine gets a layer of its cache for every visit."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from transformers.generation import GenerationMixin

from .engines import check_engine, engine_config
from .slots import plan


class BatchedGenerationMixin(GenerationMixin):
    """`generate_batch` of a model whose trips have banks of their own."""

    def init_continuous_batching(self, *args: object, **kwargs: object) -> object:
        """As in transformers, with a layer of its cache for every visit; what it cannot run is refused here."""
        visits = plan(self.config, self.model._trips(None))
        told = engine_config(self.config, visits)
        check_engine(self.config, self.model.recurrence, visits, {"cache": SimpleNamespace(config=told)})
        # The engine gets this model's modules under a configuration with a layer for each visit.
        engine = self.__dict__.pop("_engine", None) or copy.copy(self)
        engine.__dict__.update(self.__dict__, config=told)
        self.__dict__["_engine"] = engine
        return GenerationMixin.init_continuous_batching(engine, *args, **kwargs)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """As in transformers."""
        if engine := self.__dict__.pop("_engine", None):
            GenerationMixin.destroy_cached_continuous_batching_manager(engine)
