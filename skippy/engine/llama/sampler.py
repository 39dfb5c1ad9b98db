"""Sampling with llama.cpp's own samplers, applied to a candidate array in numpy memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from skippy.engine.base import BoolArray, EngineError, FloatArray, Sampler
from skippy.engine.checks import token_array
from skippy.engine.mirostat import BESIDE_MIROSTAT, Mirostat, surprise_count
from skippy.engine.sampling import check_chat_metadata, check_settings, greedy, is_greedy, only, step_seed
from skippy.protocol.messages import SamplingConfig

from .native import api
from .vocabulary import LlamaVocabulary

_CANDIDATE: Final = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
"""``llama_token_data``."""

_MIN_KEEP: Final = 1
_PURPOSE_DRAW: Final = b"skippy-draw"
_PURPOSE_XTC: Final = b"skippy-xtc"

_SHAPES_LOGITS: Final = frozenset({"penalties", "dry"})
"""Samplers that change logits by history; the only ones that matter to a greedy choice."""


class LlamaSampler(Sampler):
    """One session's sampler.

    Logit bias comes first, then the settings' samplers in their order, then the draw. A temperature of 0 (see
    :func:`~skippy.engine.sampling.is_greedy`) means the highest logit after bias, penalties and DRY, the
    lowest id among equals. Random samplers (XTC and the draw) are made anew for each step, with a seed
    derived from (settings.seed, step). With mirostat, samplers that cut candidates off are left out, as in
    llama.cpp, and the draw is mirostat's, with the surprise that it may go up to in this step.
    """

    def __init__(
        self,
        vocabulary: LlamaVocabulary,
        context_length: int,
        settings: SamplingConfig | None,
        chat_metadata: str | None = None,
    ) -> None:
        """Raises ValueError for settings that are not supported or out of range, by name."""
        check_chat_metadata(chat_metadata)
        if settings is not None and not settings.enabled:
            settings = None
        if settings is not None:
            check_settings(settings, vocabulary.size)
        self._vocabulary = vocabulary
        self._settings = settings
        self._context_length = context_length
        self._owned: list[Any] = []
        self._history: list[Any] = []
        self._accepted: set[int] = set()
        self._first_penalties: Any = None
        self._chain: list[Callable[[int], None]] = []  # applied to the candidates of a step
        self._mirostat: Mirostat | None = None
        self._closed = False
        self._keep = 0
        if settings is not None:
            self._prepare(settings)

    def _prepare(self, settings: SamplingConfig) -> None:
        size = self._vocabulary.size
        self._candidates = np.zeros(size, dtype=_CANDIDATE)
        self._ids: npt.NDArray[np.int32] = np.arange(size, dtype=np.int32)
        self._array = api.llama_token_data_array()
        self._data = ctypes.cast(self._candidates.ctypes.data, type(self._array.data))
        self._bias_ids = np.array([token for token, _ in settings.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in settings.logit_bias], dtype=np.float32)
        ends = self._vocabulary.end_of_generation if settings.ignores_eos else ()
        self._banned = np.array(sorted(ends), dtype=np.int64)
        self._greedy = is_greedy(settings)
        names = [name for name in settings.samplers if not _is_neutral(name, settings)]
        if self._greedy:
            names = [name for name in names if name in _SHAPES_LOGITS]
        elif settings.mirostat_mode:
            names = [name for name in names if name in BESIDE_MIROSTAT]
            self._mirostat = Mirostat(settings)
        if names and names[0] == "penalties":
            self._first_penalties = self._make_penalties(settings)
            del names[0]
        for name in names:
            self._add(name, settings)

    def _add(self, name: str, settings: SamplingConfig) -> None:
        if name == "penalties":
            sampler = self._make_penalties(settings)
            self._chain.append(lambda _step: self._apply(sampler))
        elif name == "dry":
            self._add_dry(settings)
        elif name == "xtc":
            self._chain.append(self._apply_xtc)
        elif name == "temperature":
            self._add_temperature(settings)
        elif name == "top_n_sigma":
            self._add_fixed(api.llama_sampler_init_top_n_sigma(settings.top_nsigma))
        elif name == "top_k":
            self._add_fixed(api.llama_sampler_init_top_k(settings.top_k))
        elif name == "typical_p":
            self._add_fixed(api.llama_sampler_init_typical(settings.typical_p, _MIN_KEEP))
        elif name == "top_p":
            self._add_fixed(api.llama_sampler_init_top_p(settings.top_p, _MIN_KEEP))
        else:
            self._add_fixed(api.llama_sampler_init_min_p(settings.min_p, _MIN_KEEP))

    def _add_fixed(self, sampler: Any) -> None:
        self._owned.append(sampler)
        self._chain.append(lambda _step: self._apply(sampler))

    def _add_temperature(self, settings: SamplingConfig) -> None:
        sampler = api.llama_sampler_init_temp_ext(
            settings.temperature, settings.dynatemp_range, settings.dynatemp_exponent
        )
        if settings.dynatemp_range > 0.0 or settings.samplers.count("temperature") > 1:
            self._owned.append(sampler)
            self._chain.append(lambda _step: self._apply_temperature(sampler))
        else:
            self._add_fixed(sampler)

    def _apply_temperature(self, sampler: Any) -> None:
        """Where the resulting temperature is so near 0 that f32 overflows, keep the best candidate alone.

        A dynamic temperature follows the entropy of the step, and several temperatures multiply: neither is
        known beforehand, as what :func:`is_greedy` looks at is.
        """
        before = self._left()
        best = int(before["id"][int(np.argmax(before["logit"]))])
        self._apply(sampler)
        left = self._left()
        if not np.isfinite(left["logit"].max()):
            left[0] = (best, 0.0, 1.0)
            self._array.size, self._array.selected, self._array.sorted = 1, -1, True

    def _make_penalties(self, settings: SamplingConfig) -> Any:
        last = self._window(settings.penalty_last_n)
        sampler = api.llama_sampler_init_penalties(
            self._vocabulary.size,
            last,
            settings.repeat_penalty,
            settings.frequency_penalty,
            settings.presence_penalty,
        )
        self._owned.append(sampler)
        self._remember(sampler, last)
        return sampler

    def _add_dry(self, settings: SamplingConfig) -> None:
        last = self._window(settings.dry_penalty_last_n)
        breakers = [breaker.encode() for breaker in settings.dry_sequence_breakers]
        sampler = api.llama_sampler_init_dry(
            self._vocabulary.pointer,
            settings.dry_multiplier,
            settings.dry_base,
            settings.dry_allowed_length,
            last,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )
        self._add_fixed(sampler)
        self._remember(sampler, last)

    def _window(self, asked: int) -> int:
        """Tokens to look back at, -1 standing for all. llama.cpp takes four bytes for each at once, so never
        more than there can be."""
        return self._context_length if asked < 0 else min(asked, self._context_length)

    def _remember(self, sampler: Any, last: int) -> None:
        self._history.append(sampler)
        self._keep = max(self._keep, last)

    def _apply_xtc(self, step: int) -> None:
        assert self._settings is not None
        settings = self._settings
        seed = step_seed(settings.seed, step, _PURPOSE_XTC)
        self._apply_once(
            api.llama_sampler_init_xtc(settings.xtc_probability, settings.xtc_threshold, _MIN_KEEP, seed)
        )

    def accept(self, tokens: Sequence[int]) -> None:
        """As the base class says. Raises ValueError for an id outside the vocabulary; none is taken then."""
        self._check_open()
        if not self._history or not len(tokens):
            return
        kept = token_array(tokens, self._vocabulary.size)[-self._keep :].tolist() if self._keep else []
        self._accepted.update(kept)
        for sampler in self._history:
            for token in kept:
                api.llama_sampler_accept(sampler, token)

    def sample(self, logits: FloatArray, step: int, allowed: BoolArray | None = None) -> int:
        self._check_open()
        settings = self._settings
        if settings is None:
            return greedy(only(logits, allowed))
        if logits.shape != self._ids.shape:
            raise ValueError(f"logits of shape {logits.shape}, expected {self._ids.shape}")
        values = only(self._biased(logits), allowed)
        best = greedy(values)  # also refuses NaN
        if self._first_penalties is not None and self._accepted:
            values = self._penalised(values)
            best = greedy(values)
        if self._greedy and not self._chain:
            return best
        if allowed is None and not self._banned.size:
            ids = self._ids
        else:  # what cannot be drawn is no candidate: some samplers multiply minus infinity by 0
            ids = self._ids[values > -np.inf]
            values = values[ids]
        candidates = self._candidates[: len(ids)]
        candidates["id"] = ids
        candidates["logit"] = values
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._data, len(candidates), -1, False
        for apply in self._chain:
            apply(step)
        if self._greedy:
            left = self._left()
            top = left["logit"].max()
            return int(left["id"][left["logit"] == top].min())
        seed = step_seed(settings.seed, step, _PURPOSE_DRAW)
        if self._mirostat is None:
            return self._draw(api.llama_sampler_init_dist(seed))[0]
        limit = self._mirostat.limit(step)
        if settings.mirostat_mode == 1:
            # Not llama.cpp's own: on flat distributions its number of tokens overflows, and one is left.
            count = surprise_count(self._left()["logit"], limit)
            self._apply_once(api.llama_sampler_init_top_k(count))
            draw = api.llama_sampler_init_dist(seed)
        else:
            # It begins at twice its target: made anew, it begins where the last draw has ended.
            draw = api.llama_sampler_init_mirostat_v2(seed, limit / 2, 0.0)
        token, probability = self._draw(draw)
        self._mirostat.drawn(step, probability)
        return token

    def _biased(self, logits: FloatArray) -> FloatArray:
        if not self._bias_ids.size and not self._banned.size:
            return logits
        values = logits.copy()
        np.add.at(values, self._bias_ids, self._bias)
        values[self._banned] = -np.inf
        return values

    def _penalised(self, values: FloatArray) -> FloatArray:
        """Logits after penalties, which look at each candidate alone and leave all but accepted tokens."""
        ids = np.fromiter(self._accepted, np.int32, len(self._accepted))
        few = np.zeros(ids.size, dtype=_CANDIDATE)
        few["id"], few["logit"] = ids, values[ids]
        array = api.llama_token_data_array(size=ids.size, selected=-1)
        array.data = ctypes.cast(few.ctypes.data, type(array.data))
        api.llama_sampler_apply(self._first_penalties, ctypes.byref(array))
        values = values.copy()
        values[ids] = few["logit"]
        return values

    def _draw(self, sampler: Any) -> tuple[int, float]:
        """Let a sampler choose: the token, and its probability among those that were left."""
        self._apply_once(sampler)
        left, selected = self._left(), int(self._array.selected)
        if not 0 <= selected < len(left):
            raise EngineError("the samplers left no token to choose from")
        probability = float(left["p"][selected])
        if not probability > 0.0:
            raise EngineError("the sampling settings drove the logits beyond the range of f32")
        return int(left["id"][selected]), probability

    def _left(self) -> npt.NDArray[np.void]:
        """The candidates that are left. Samplers cut at the end, and XTC moves the start of the array."""
        address = ctypes.cast(self._array.data, ctypes.c_void_p).value or 0
        start, misplaced = divmod(address - self._candidates.ctypes.data, _CANDIDATE.itemsize)
        stop = start + int(self._array.size)
        if misplaced or not 0 <= start <= stop <= len(self._candidates):
            raise EngineError("a sampler moved the candidates out of their array")
        return self._candidates[start:stop]

    def _apply(self, sampler: Any) -> None:
        api.llama_sampler_apply(sampler, ctypes.byref(self._array))

    def _apply_once(self, sampler: Any) -> None:
        self._apply(sampler)
        api.llama_sampler_free(sampler)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this sampler is closed")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for sampler in self._owned:
                api.llama_sampler_free(sampler)
            self._owned = []
            self._history = []
            self._chain = []


def _is_neutral(name: str, settings: SamplingConfig) -> bool:
    """Whether llama.cpp's sampler would do nothing with these settings, but take its time over it."""
    if name == "penalties":
        plain = settings.repeat_penalty == 1.0 and not settings.frequency_penalty
        return settings.penalty_last_n == 0 or (plain and not settings.presence_penalty)
    return {
        "dry": settings.dry_multiplier == 0.0 or settings.dry_base < 1.0,
        "top_n_sigma": settings.top_nsigma <= 0.0,
        "top_k": settings.top_k <= 0,
        "typical_p": settings.typical_p >= 1.0,
        "top_p": settings.top_p >= 1.0,
        "min_p": settings.min_p <= 0.0,
        "xtc": settings.xtc_probability == 0.0,
        "temperature": settings.temperature == 1.0 and settings.dynatemp_range == 0.0,
    }[name]
