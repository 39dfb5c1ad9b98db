"""Configuration of one stage: the JSON object of ``stage.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import attrs

from .endpoint import Endpoint
from .fields import (
    key,
    meaningless,
    refuse_unavailable,
    require,
    require_range,
    require_sha256,
    require_text,
    unavailable,
)
from .kv import KvCacheConfig
from .quantization import NEEDS_IMATRIX, PRESERVE, QUANTIZATIONS, check_imatrix, parse_quantization

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
SplitMode = Literal["auto", "none", "layer", "row", "tensor"]
FlashAttention = Literal["auto", "disabled", "enabled"]

LOAD_MODES: Final[Mapping[str, str]] = {
    "runtime-slice": "a GGUF file or a checkpoint's folder",
    "artifact-slice": "a GGUF file with this stage's layers",
    "layer-package": "a folder with model-package.json, or hf://namespace/repo",
}
"""How a stage's part can be loaded, and what `model_path` names then."""

MAX_ADAPTERS: Final = 16
"""LoRA adapters on one model; each adds two multiplications to every matrix that it changes."""

U32_MAX = 2**32 - 1
I32_MAX = 2**31 - 1


@attrs.frozen(slots=True, kw_only=True)
class PeerConfig:
    """The stage before or after this one."""

    stage_id: str = key("The peer's stage_id.")
    stage_index: int = key("The peer's stage_index.")
    endpoint: str = key(
        "Where the peer listens: `host:port` (TCP), or with `tls://`, `ws://` or `wss://` in front."
    )

    def __attrs_post_init__(self) -> None:
        require_text(self, "stage_id")
        require_range(self, 0, U32_MAX, "stage_index")
        Endpoint.parse(self.endpoint)

    @property
    def address(self) -> Endpoint:
        return Endpoint.parse(self.endpoint)


@attrs.frozen(slots=True, kw_only=True)
class SelectedDevice:
    """The device that a stage computes on."""

    backend_device: str = key("The device's name as the engine reports it: `CPU`, or a GPU such as `CUDA0`.")
    stable_id: str | None = unavailable(None, "choosing a device by stable_id is")
    index: int | None = unavailable(None, "choosing a device by index is")
    vram_bytes: int | None = unavailable(None, "checking a device's memory is")

    def __attrs_post_init__(self) -> None:
        require_text(self, "backend_device")
        refuse_unavailable(self)


@attrs.frozen(slots=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter on the model."""

    path: str = key(
        "A GGUF file of llama.cpp's `convert_lora_to_gguf.py`. One that changes the embedding is refused."
    )
    scale: float = key("What its changes are multiplied with.", default=1.0)

    def __attrs_post_init__(self) -> None:
        require_text(self, "path")
        require(
            math.isfinite(self.scale) and self.scale != 0,
            f"scale: is {self.scale}, must be a finite number and not 0",
        )


@attrs.frozen(slots=True, kw_only=True)
class StageConfig:
    """One stage. Valid once built: ConfigError names the key that is wrong."""

    run_id: str = key("Names this run; equal on all stages of a chain.")
    topology_id: str = key("Names the cut; equal on all stages of a chain.")
    model_id: str = key("Names the model; equal on all stages of a chain, and what clients see.")
    stage_id: str = key("Names this stage; unique in the chain.")
    stage_index: int = key("Position in the chain; 0 takes the requests.")
    layer_start: int = key("First layer of this stage.")
    layer_end: int = key("One after the last layer of this stage.")
    load_mode: str = key(
        "How the model is loaded. `runtime-slice`: cut this stage's layers out of `model_path`, once, "
        "or make them of a checkpoint, "
        "or load it as it is if it is a slice of exactly these layers. `artifact-slice`: load `model_path` "
        "as it is; it must be such a slice. `layer-package`: put the stage's part together, once, from the "
        "files of the package that have its layers; no other is opened."
    )
    bind_addr: str = key(
        "Where this stage listens: `host:port` (TCP), or with `tls://`, `ws://` or `wss://` in front; port 0 "
        "for any. Unless the host is `0.0.0.0` or `[::]`, "
        "connections to other stages leave from this address too."
    )
    model_path: str | None = key(
        "The model's GGUF file: whole, the first of several, or the slice of this stage; with "
        "`layer-package` the package's folder; or the folder of a SafeTensors checkpoint. Or "
        "`hf://namespace/repo[:revision]`, where a hub has it, and with `/FILE.gguf` behind the repository "
        "one of several. Required, unless package_ref names a package.",
        default=None,
    )
    upstream: PeerConfig | None = key(
        "The stage before this one; null on stage 0, or to take it from the topology.", default=None
    )
    downstream: PeerConfig | None = key(
        "The stage after this one; null on the last stage, or to take it from the topology.", default=None
    )
    ctx_size: int = key("Positions one session may hold: prompt and answer, in tokens.", default=512)
    lane_count: int = key("Sessions the stage holds at once.", default=4)
    n_threads: int | None = key("CPU threads of the engine; null: one per core.", default=None)
    n_batch: int | None = key("Rows one engine call may carry; null: the engine's choice.", default=None)
    n_ubatch: int | None = key(
        "Rows computed at once, at most n_batch; null: the engine's choice.", default=None
    )
    batch_max_tokens: int | None = key(
        "Rows of one engine call that carries decode steps and prefill together, at most n_batch; null: the "
        "two never share a call, which is faster on a CPU. No effect on models with recurrent state.",
        default=None,
    )
    selected_device: SelectedDevice | None = key(
        "The only device to use, `CPU` for no GPU; null: the engine's choice. One that is not there is "
        "refused when the model is loaded.",
        default=None,
    )
    n_gpu_layers: int = key(
        "Layers of this stage kept on a GPU; -1 for all. Refused where there is none.", default=0
    )
    cache_type_k: CacheType = key("Element type of the key cache.", default="f16")
    cache_type_v: CacheType = key("Element type of the value cache.", default="f16")
    flash_attn_type: FlashAttention = key("Flash attention.", default="auto")
    mmap: bool | None = key(
        "Map the model file instead of reading it; null: yes, unless direct_io.", default=None
    )
    mlock: bool = key("Lock the model in memory.", default=False)
    direct_io: bool = key("Read the model file past the page cache; excludes mmap and mlock.", default=False)
    repack: bool = key(
        "Let the engine convert weights at load to a layout its CPU kernels prefer, where there is one for "
        "their type. Converted weights are in memory of this process, not mapped.",
        default=True,
    )
    check_tensors: bool = key("Check all weights for invalid numbers at load.", default=False)
    no_host_buffer: bool = key("Bypass host buffers, so that extra buffer types can be used.", default=False)
    split_mode: SplitMode = key(
        "How several GPUs share the stage; auto: the engine's choice. Refused where there is none.",
        default="auto",
    )
    main_gpu: int | None = key("The GPU that is used when one is; null: the first.", default=None)
    op_offload: bool | None = key("Run operations on host tensors on the GPU; null: yes.", default=None)
    kv_offload: bool | None = key("Keep the KV cache on the GPU; null: yes.", default=None)
    kv_unified: bool | None = key(
        "One pool of cache cells for all sessions, instead of one for each; null: no, which measured "
        "faster (docs/performance.md). Numbers depend on what else runs if it is true.",
        default=None,
    )
    swa_full: bool | None = key("Full-size cache for sliding-window layers; null: yes.", default=None)
    kv_cache: KvCacheConfig | None = key(
        "What the stage remembers between requests; null: nothing, unless SKIPPY_KV_CACHE says otherwise.",
        default=None,
    )
    native_mtp_enabled: bool = key(
        "Use a model's multi-token-prediction layers. Not available yet: refused for a model that has them; "
        "for one without them, true is a notice and has no effect.",
        default=False,
    )

    checkpoint_quantization: str | None = key(
        "What the tensors of a SafeTensors checkpoint become when a stage's part is made of it: "
        f"{', '.join(f'`{name}`' for name in QUANTIZATIONS)}; case and punctuation do not matter. Types are "
        "those that llama.cpp gives to the whole model. `preserve` (also `direct`, `none`, null) keeps them.",
        default=None,
    )
    checkpoint_imatrix: str | None = key(
        "An importance matrix for the quantisation, a file of llama.cpp's `llama-imatrix`. Needed by "
        f"{', '.join(f'`{name}`' for name in QUANTIZATIONS if name in NEEDS_IMATRIX)}.",
        default=None,
    )
    checkpoint_imatrix_sha256: str | None = key(
        "The SHA-256 that `checkpoint_imatrix` must have; null: any.", default=None
    )
    lora_adapters: tuple[LoraAdapter, ...] = key(
        "LoRA adapters on the model; the same in the same order on all stages. Each stage takes what is for "
        f"its own layers. At most {MAX_ADAPTERS}.",
        default=(),
    )
    manifest_sha256: str | None = key(
        "With `layer-package`: the SHA-256 that `model-package.json` must have; null: any.", default=None
    )
    package_ref: str | None = key(
        "With `layer-package`, instead of `model_path`: the package's folder, or `hf://namespace/repo`.",
        default=None,
    )
    source_model_sha256: str | None = key(
        "The SHA-256 that the whole model's GGUF file must have; of one in several files, that of their "
        "digests, 32 bytes each. A slice and a package say which model they were made of. Null: any.",
        default=None,
    )
    source_model_bytes: int | None = key(
        "The size that the whole model's GGUF files must have together; null: any. A slice does not say.",
        default=None,
    )
    materialized_pinned: bool = key(
        "Keep the stage's file in the cache. It always is: nothing is ever removed from the cache, so true "
        "and false mean the same.",
        default=False,
    )
    filter_tensors_on_load: bool = key(
        "Load no tensors but this stage's. None ever are: the file of a stage has no others, whatever the "
        "load_mode, so true and false mean the same.",
        default=False,
    )
    source_model_path: str | None = meaningless(
        None, "nothing is read from a model that is not loaded; model_path names what is"
    )
    materialized_path: str | None = meaningless(
        None,
        "the cache names files by what is in them, and SKIPPY_CACHE says where it is; load_mode "
        "artifact-slice loads a stage's file from any path",
    )
    projector_path: str | None = unavailable(None, "image and audio input is")
    projector_use_gpu: bool | None = unavailable(None, "image and audio input is")
    media_marker: str | None = unavailable(None, "image and audio input is")
    image_min_tokens: int | None = unavailable(None, "image and audio input is")
    image_max_tokens: int | None = unavailable(None, "image and audio input is")
    generation_signal_window: int | None = unavailable(None, "the generation signal window is")
    cache_idle_slots: int | None = unavailable(None, "keeping idle sessions cached is")
    glm_dsa_policy: str = unavailable("auto", "choosing the GLM sparse attention policy is")
    resident_tensor_names: tuple[str, ...] = unavailable((), "naming resident tensors is")
    activation_codec: str = unavailable("f32", "packing activations is")
    activation_codec_policy: str = unavailable("fixed", "choosing the activation codec by measurement is")

    def __attrs_post_init__(self) -> None:
        require_text(
            self,
            *("run_id", "topology_id", "model_id", "stage_id"),
            *("model_path", "package_ref", "checkpoint_imatrix"),
        )
        require_range(self, 0, U32_MAX, "stage_index", "layer_start", "layer_end")
        require_range(self, 1, 2**24, "ctx_size")
        require_range(self, 1, 2**20, "n_batch", "n_ubatch", "batch_max_tokens")
        require_range(self, 1, 256, "lane_count")
        require_range(self, 1, 512, "n_threads")
        require_range(self, 0, 255, "main_gpu")
        require_range(self, -1, 2**20, "n_gpu_layers")
        require(
            self.layer_start < self.layer_end,
            f"layer_start: is {self.layer_start}, must be below layer_end, which is {self.layer_end}",
        )
        self._check_engine()
        check_load_mode(self.load_mode)
        self._check_model()
        self._check_checkpoint()
        count = len(self.lora_adapters)
        require(count <= MAX_ADAPTERS, f"lora_adapters: has {count} entries, at most {MAX_ADAPTERS} are used")
        Endpoint.parse(self.bind_addr, where="bind_addr", allow_any_port=True)
        self._check_position()
        self._check_kv_cache()
        refuse_unavailable(self)

    def _check_engine(self) -> None:
        """Settings that exclude each other."""
        cells = self.ctx_size * self.lane_count
        require(cells <= I32_MAX, f"ctx_size: times lane_count is {cells} cache cells, must be below 2**31")
        if self.n_batch is not None and self.n_ubatch is not None:
            require(
                self.n_ubatch <= self.n_batch, f"n_ubatch: is {self.n_ubatch}, above n_batch {self.n_batch}"
            )
        require(
            not (self.direct_io and self.mmap), "direct_io: excludes mmap; leave mmap out or set it to false"
        )
        require(not (self.direct_io and self.mlock), "direct_io: excludes mlock")
        require(
            self.flash_attn_type != "disabled" or self.cache_type_v in ("f32", "f16", "bf16"),
            f'cache_type_v: "{self.cache_type_v}" needs flash_attn_type auto or enabled',
        )

    def _check_model(self) -> None:
        """What is loaded, and what it has to be."""
        for name in ("package_ref", "manifest_sha256"):
            require(
                getattr(self, name) is None or self.load_mode == "layer-package",
                f"{name}: has no effect with load_mode {self.load_mode}; leave it out",
            )
        require(
            self.model_path is not None or self.package_ref is not None,
            f"model_path: is missing; load_mode {self.load_mode} needs {LOAD_MODES[self.load_mode]}",
        )
        require(
            None in (self.model_path, self.package_ref) or self.model_path == self.package_ref,
            "package_ref: names another package than model_path; leave one of them out",
        )
        require_sha256(self, "manifest_sha256", "source_model_sha256")
        require_range(self, 1, 2**63 - 1, "source_model_bytes")

    def _check_checkpoint(self) -> None:
        check_imatrix(parse_quantization(self.checkpoint_quantization or PRESERVE), self.checkpoint_imatrix)
        require_sha256(self, "checkpoint_imatrix_sha256")
        require(
            self.checkpoint_imatrix_sha256 is None or self.checkpoint_imatrix is not None,
            "checkpoint_imatrix_sha256: has no effect without checkpoint_imatrix; leave it out",
        )

    def _check_kv_cache(self) -> None:
        extra = None if self.kv_cache is None else self.kv_cache.extra_sequences
        if extra:
            sequences = self.lane_count + extra
            require(
                sequences <= 256,
                f"kv_cache.extra_sequences: and lane_count are {sequences} sequences, at most 256",
            )
            require(
                self.kv_unified is True or sequences * self.ctx_size <= I32_MAX,
                f"kv_cache.extra_sequences: ctx_size times {sequences} sequences must be below 2**31",
            )

    def _check_position(self) -> None:
        """Stage index, first layer and neighbours must tell one story."""
        index = self.stage_index
        if index == 0:
            require(
                self.layer_start == 0, f"layer_start: is {self.layer_start}, but stage 0 starts at layer 0"
            )
            require(self.upstream is None, "upstream: must be null, because stage 0 is the first")
        else:
            require(
                self.layer_start > 0, f"layer_start: is 0, but only stage 0 starts there, not stage {index}"
            )
        for name, peer, expected in (
            ("upstream", self.upstream, index - 1),
            ("downstream", self.downstream, index + 1),
        ):
            if peer is None:
                continue
            require(
                peer.stage_index == expected,
                f"{name}.stage_index: is {peer.stage_index}, must be {expected} next to stage {index}",
            )
            require(
                peer.stage_id != self.stage_id, f"{name}.stage_id: is this stage's own id {self.stage_id!r}"
            )

    @property
    def model(self) -> str:
        """Where the model is: a path, or a reference to a hub."""
        return self.model_path or self.package_ref or ""  # one of them is there

    @property
    def bind_endpoint(self) -> Endpoint:
        return Endpoint.parse(self.bind_addr, where="bind_addr", allow_any_port=True)


def check_load_mode(load_mode: str) -> None:
    """Refuse a mode that does not exist, by name."""
    require(
        load_mode in LOAD_MODES, f'load_mode: "{load_mode}" is unknown; known are {", ".join(LOAD_MODES)}'
    )
