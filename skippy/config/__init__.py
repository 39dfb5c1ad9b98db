"""What a stage is told: configuration values, read from JSON or built by a host.

All values are frozen and valid once they exist; a wrong one raises :class:`ConfigError`, in users' words.
A leaf: anyone may import it, it imports nothing of skippy.
"""

from .access import AccessOptions
from .endpoint import Endpoint
from .errors import ConfigError
from .files import load_stage_config, load_topology, stage_config_from_json, topology_from_json
from .kv import KvCacheConfig, with_environment
from .links import check_links
from .options import OpenAIOptions, StageOptions, WireConditions
from .stage import LOAD_MODES, LoraAdapter, PeerConfig, SelectedDevice, StageConfig
from .structure import from_json_value, to_json_value
from .switches import switched_on
from .topology import StagePlacement, StageTopology, check_against_topology

__all__ = [
    "LOAD_MODES",
    "AccessOptions",
    "ConfigError",
    "Endpoint",
    "KvCacheConfig",
    "LoraAdapter",
    "OpenAIOptions",
    "PeerConfig",
    "SelectedDevice",
    "StageConfig",
    "StageOptions",
    "StagePlacement",
    "StageTopology",
    "WireConditions",
    "check_against_topology",
    "check_links",
    "from_json_value",
    "load_stage_config",
    "load_topology",
    "stage_config_from_json",
    "switched_on",
    "to_json_value",
    "topology_from_json",
    "with_environment",
]
