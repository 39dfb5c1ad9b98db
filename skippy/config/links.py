"""Which links a stage's files and options ask for, and whether they fit."""

from __future__ import annotations

from .endpoint import Endpoint
from .fields import require
from .options import StageOptions
from .stage import StageConfig
from .topology import StageTopology

TLS_SCHEMES = ("tls", "wss")


def check_links(config: StageConfig, topology: StageTopology | None, options: StageOptions) -> None:
    """Refuse TLS without a certificate to listen with, and TLS files that no link would use.

    Raises:
        ConfigError: naming the option.
    """
    bind = config.bind_endpoint
    endpoints: list[Endpoint] = [bind]
    endpoints += [peer.address for peer in (config.upstream, config.downstream) if peer is not None]
    if topology is not None:
        endpoints += [stage.address for stage in topology.stages]
    require(
        bind.scheme not in TLS_SCHEMES or options.tls_cert is not None,
        f"tls_cert: is missing, but bind_addr is {bind}; give --tls-cert and --tls-key",
    )
    given = next((name for name in ("tls_cert", "tls_ca") if getattr(options, name) is not None), None)
    require(
        given is None or any(endpoint.scheme in TLS_SCHEMES for endpoint in endpoints),
        f"{given}: is given, but no endpoint of this stage begins with tls:// or wss://",
    )
