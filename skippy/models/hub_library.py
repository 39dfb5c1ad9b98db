"""``huggingface_hub`` as models are fetched with it: where it keeps files, and what its failures mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from skippy.models.errors import HubError
from skippy.models.store import Progress

CACHE = "SKIPPY_HF_PACKAGE_CACHE"
"""Environment: where files are kept instead of in the cache of ``huggingface_hub``."""
_HINTS = {
    401: "; a token may be needed (HF_TOKEN)",
    403: "; the token (HF_TOKEN) may lack the permission",
    429: "; try again in a while, or with a token (HF_TOKEN)",
}


@contextmanager
def explained(reference: str) -> Iterator[None]:
    """The library's failures as HubError, with what to do about them."""
    errors = library().errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            reference, "asks for its terms to be accepted on its web page, and for a token (HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            reference, "no such repository, or a private one: then a token is needed (HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(reference, "no such revision of the repository") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(reference, _unreachable(_first_line(error.__cause__ or error))) from error
    except errors.EntryNotFoundError as error:
        raise HubError(reference, f"no such file: {_first_line(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(reference, _unreachable("HF_HUB_OFFLINE is set")) from error
    except errors.HfHubHTTPError as error:
        hint = _HINTS.get(getattr(error.response, "status_code", 0), "")
        raise HubError(reference, f"the hub answered {_first_line(error)}{hint}") from error
    except (errors.HTTPError, ConnectionError, TimeoutError) as error:
        raise HubError(reference, _unreachable(_first_line(error))) from error
    except OSError as error:
        if error.errno is not None:
            raise HubError(
                reference,
                f"cannot be kept in {cache_dir()}: {error.strerror}; {CACHE} names another folder",
            ) from error
        raise HubError(reference, f"was not sent as announced: {_first_line(error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise HubError(reference, f"the hub does not make sense: {_first_line(error)}") from error


def is_answer(errors: ModuleType, error: BaseException | None) -> bool:
    """Whether the hub has said no, rather than nothing."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    return isinstance(error, errors.HfHubHTTPError) and 400 <= status < 500 and status not in (408, 429)


def _unreachable(why: str) -> str:
    return (
        f"the hub at {endpoint() or 'https://huggingface.co'} cannot be reached: {why}; "
        "with a network, `skippy fetch` brings the files here once; or name the path of files that are here"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__


def cache_dir() -> Path:
    configured = os.environ.get(CACHE)
    return Path(configured or library().constants.HF_HUB_CACHE)


def endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def library() -> Any:
    """``huggingface_hub``, imported where it is needed: it takes a while."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors

    return huggingface_hub


def bar(reference: str, name: str, progress: Progress | None, limit: int | None) -> type:
    """What the library draws progress with, as a class that calls ``progress``, and ends what is too long."""

    class Bar:
        def __init__(self, *_: object, total: int | None = None, initial: int = 0, **__: object) -> None:
            self.total, self.n = total, initial
            self.check(total or 0)

        def check(self, size: int) -> None:
            most = limit if self.total is None else self.total if limit is None else min(limit, self.total)
            if most is not None and size > most:
                raise HubError(reference, f"{name} has at least {size} bytes, announced are {most}")

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            self.check(self.n)
            if progress is not None:
                progress("download", self.n, max(int(self.total or 0), self.n))

        def refresh(self, *_: object, **__: object) -> None: ...

        set_description = set_postfix = set_description_str = set_postfix_str = close = refresh

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Bar
