"""A folder of an object store, by URL: whole objects put, got, listed, deleted; ranges of them read.

``s3://``, ``gs://``, ``az://`` and their like, ``file://`` go through obstore, any other URL through fsspec. Both are
optional and imported when a URL is used. Credentials come from the environment or the provider's usual chain, never
from the URL: a URL ends up in files and logs.

A store that has answered before and cannot be reached now is asked again for two minutes: a run of days outlives a short
outage. One that never answered is not, so that a wrong endpoint or bucket is told at once.
"""

import contextlib
import datetime
import importlib.metadata
import os
import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from dflash_offline.errors import StoreDamagedError, StoreError
from dflash_offline.store_url import HOLDS_SECRETS, holds_secrets

_OBSTORE = {"s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file"}
_RETRIES, _RETRY_S = 5, 60  # obstore's own: seconds in all, for a reply that got lost
PATIENCE_S = 120.0  # an outage that is waited for
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 20.0  # between two attempts; each pause is twice the one before
_ENDPOINT = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")


Result = TypeVar("Result")


class MissingObjectError(StoreDamagedError):
    """An object that should be there is not."""


class UnreachableError(StoreError):
    """The store does not answer, or says that it cannot now."""


class Objects(ABC):
    """Objects below ``url``; names are relative to it, with slashes. Safe to use from several threads."""

    def __init__(self, url: str):
        self.url = url
        self._outage = _Outage(url)

    @abstractmethod
    def put(self, name: str, content: bytes | Path, *, create: bool = False) -> bool:
        """Write one object whole, from memory or from a file. With ``create`` only if there is none; False if there is."""

    @abstractmethod
    def get(self, name: str) -> bytes:
        """One object, whole.

        Raises:
            MissingObjectError: there is none of that name.
            StoreError: the store cannot be reached or refuses, in one line; so does every other method.
        """

    @abstractmethod
    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Bytes ``[start, stop)`` of an object for each range, read side by side; buffers."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Name and bytes of every object below ``prefix``, a folder's name."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders right below ``url``, however much is in them."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; those that are gone already are no error."""

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn what the library says into one line. What may hold a signature or a key is cut off."""
        where = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # obstore and fsspec share no base class below it
            text = str(error)
            if "NoSuchBucket" in text or "ContainerNotFound" in text or "specified bucket does not exist" in text:
                raise StoreError(f"{self.url}: there is no such bucket; create it, or mend [store] url") from None
            if isinstance(error, FileNotFoundError):
                raise MissingObjectError(f"{where}: the object is missing") from None
            line = re.sub(r"\?\S*|(?<=//)[^\s/@]*@", "", _first_line(error))[:240].rstrip(" :")
            kind = UnreachableError if _may_pass(error) else StoreError
            raise kind(
                f"{where}: the object store cannot be used ({line}); check [store] url, credentials and endpoint of this environment"
            ) from None

    def _readable(self, name: str, content: bytes | Path) -> bytes | Path:
        """``content``, if it is there to be put as ``name``: what the libraries say of a file here reads like a word of the store.

        Raises:
            StoreError: the file cannot be read.
        """
        if isinstance(content, Path):
            try:
                content.open("rb").close()
            except OSError as error:
                raise StoreError(
                    f"{content}: cannot be read ({error.strerror}), so {self.url}/{name} is not written; run the same command again"
                ) from None
        return content

    def _patiently(self, name: str, act: Callable[[], Result]) -> Result:
        """Do what may be done twice, ``act``; an outage is waited for (see the module's docstring)."""
        while True:
            try:
                with self._explained(name):
                    result = act()
            except UnreachableError as error:
                self._outage.wait(error)
            except MissingObjectError:  # an answer too
                self._outage.over()
                raise
            else:
                self._outage.over()
                return result


class _Outage:
    """Since when the store does not answer, for all threads together."""

    def __init__(self, url: str):
        self._url, self._lock = url, threading.Lock()
        self._answered, self._since = False, None

    _since: float | None

    def wait(self, error: UnreachableError) -> None:
        """Sleep before the next attempt.

        Raises:
            UnreachableError: ``error``, when the store never answered or has not for too long.
        """
        with self._lock:
            if not self._answered:
                raise error
            now = time.monotonic()
            if self._since is None:
                self._since = now
                print(f"{error}; asked again for {PATIENCE_S:.0f} s", flush=True)
            lasted = now - self._since
        if lasted >= PATIENCE_S:
            raise UnreachableError(f"{error}; it has not answered for {lasted:.0f} s: run the same command again once it does")
        time.sleep(min(max(FIRST_PAUSE_S, lasted), LONGEST_PAUSE_S, PATIENCE_S - lasted))  # as long as it lasts: pauses double

    def over(self) -> None:
        """The store has answered."""
        if self._since is None and self._answered:
            return
        with self._lock:
            if self._since is not None:
                print(f"{self._url}: the object store answers again, after {time.monotonic() - self._since:.0f} s", flush=True)
            self._answered, self._since = True, None


def _may_pass(error: Exception) -> bool:
    """Whether an error of a library is one of the network or of a busy server: the same request may do well later."""
    kind = type(error)
    if kind.__module__.startswith("obstore"):  # refusals and missing objects have classes of their own there
        return kind.__name__ == "GenericError" and not re.search(r"LocalFileSystem|status code: 4(?!08|29)\d\d", str(error))
    return isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or kind.__module__.startswith("aiohttp")


def open_objects(url: str) -> Objects:
    """The folder at ``url``. Nothing is made there, and nothing asked of the store yet, but by kinds of fsspec that connect at once.

    Raises:
        StoreError: the URL holds a secret, the package for this kind of URL is not installed, the URL is none, or the store
            cannot be reached.
    """
    if holds_secrets(url):
        raise StoreError(f"the URL of the store {HOLDS_SECRETS}")
    scheme = url.partition("://")[0]
    kind, package = (_Obstore, "obstore") if scheme in _OBSTORE else (_Fsspec, "fsspec")
    try:
        return kind(url.rstrip("/"))
    except ImportError as error:
        missing = _missing_module(error) or package
        extra = "dflash_offline[objectstore]" if package == "obstore" else _to_install(scheme, missing)
        why = "" if error.name else f" ({_first_line(error)})"  # fsspec knows all that its kind needs
        raise StoreError(f"{url}: needs {missing}, which is not installed{why}; `pip install '{extra}'`") from None
    except ValueError as error:
        raise StoreError(f"{url}: not a URL that obstore or fsspec opens ({_first_line(error)})") from None


def _missing_module(error: BaseException | None) -> str | None:
    """Name of the module that an import did not find; fsspec's own error has none, the one it comes from does."""
    while isinstance(error, ImportError) and error.name is None:
        error = error.__cause__ or error.__context__
    return error.name if isinstance(error, ImportError) else None


def _to_install(scheme: str, missing: str) -> str:
    """What brings the missing module: fsspec's own extra for this kind of URL, as modules and packages differ in name; or its name."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if scheme in (importlib.metadata.metadata("fsspec").get_all("Provides-Extra") or []):
            return f"fsspec[{scheme}]"
    return missing


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_process: int | None = None  # that uses obstore, whose threads are the process's


class _Obstore(Objects):
    def __init__(self, url: str):
        import obstore

        super().__init__(url)
        self._library, self._store = obstore, None
        self._options: dict[str, Any] = {}
        self._folder: Path | None = None  # of a file:// URL
        if url.startswith("file:"):
            found = urlsplit(url)
            if found.netloc not in ("", "localhost"):
                raise StoreError(f"{url}: a folder's URL has three slashes, file:///FOLDER; mend [store] url")
            self._folder = Path(unquote(found.path))
            return
        self._options["retry_config"] = {"max_retries": _RETRIES, "retry_timeout": datetime.timedelta(seconds=_RETRY_S)}
        if url.startswith("s3"):
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT", "")
            if endpoint:
                if not _ENDPOINT.fullmatch(endpoint):
                    raise StoreError(
                        f"{url}: the endpoint in this environment must be http://HOST or https://HOST, without user and password"
                    )
                self._options["endpoint"] = endpoint
            if endpoint.startswith("http://"):
                self._options["client_options"] = {"allow_http": True}
            if "AWS_ACCESS_KEY_ID" not in os.environ and (provider := _boto3_credentials()):
                self._options["credential_provider"] = provider
        with self._explained(""):
            self._open(make=False)

    _store: Any

    def _open(self, *, make: bool) -> Any:
        """The library's store. The folder of a file:// URL is opened when it is used first; with ``make`` it is made.

        Raises:
            FileNotFoundError: it is not there.
            StoreError: in a process forked from one that has used the library: its threads did not come along, and any call would
                wait for them for ever.
        """
        global _process
        if _process not in (None, os.getpid()):
            raise StoreError(
                f"{self.url}: cannot be used here: this process was forked from one that had used an object store already; "
                'start such processes by "spawn" or "forkserver", in a torch DataLoader with multiprocessing_context="spawn"'
            )
        _process = os.getpid()
        if self._store is None:
            from obstore.store import from_url

            if self._folder is None:
                self._store = from_url(self.url, **self._options)
            elif make or self._folder.exists():
                self._store = from_url(self.url, mkdir=make)
            else:
                raise FileNotFoundError(self._folder)
        return self._store

    def put(self, name: str, content: bytes | Path, *, create: bool = False) -> bool:
        if not create:
            self._patiently(name, lambda: self._put(name, content, "overwrite"))
            return True
        with self._explained(name):  # once: a second one would find what the first one has made
            try:
                self._put(name, content, "create")
            except (FileExistsError, self._library.exceptions.AlreadyExistsError):
                return False
        return True

    def _put(self, name: str, content: bytes | Path, mode: Literal["create", "overwrite"]) -> None:
        self._library.put(self._open(make=True), name, self._readable(name, content), mode=mode)

    def get(self, name: str) -> bytes:
        return self._patiently(name, lambda: bytes(self._library.get(self._open(make=False), name).bytes()))

    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        return self._patiently(name, lambda: list(self._library.get_ranges(self._open(make=False), name, starts=starts, ends=stops)))

    def sizes(self, prefix: str = "") -> dict[str, int]:
        def read() -> dict[str, int]:
            pages = self._library.list(self._open(make=False), prefix or None)
            return {found["path"]: found["size"] for page in pages for found in page}

        try:
            return self._patiently(prefix, read)
        except MissingObjectError:
            if self._folder is None:
                raise
            return {}  # nothing was put there yet

    def folders(self) -> list[str]:
        try:
            found = self._patiently("", lambda: self._library.list_with_delimiter(self._open(make=False)))
        except MissingObjectError:
            if self._folder is None:
                raise
            return []
        return [path.rstrip("/") for path in found["common_prefixes"]]

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(MissingObjectError):
                self._patiently(name, lambda name=name: self._library.delete(self._open(make=False), name))


def _boto3_credentials() -> Any:
    """The AWS chain with profiles and single sign-on, if boto3 is there and finds something; obstore's own chain else."""
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.Session()
    return Boto3CredentialProvider(session) if session.get_credentials() is not None else None


class _Fsspec(Objects):
    def __init__(self, url: str):
        import fsspec.core

        super().__init__(url)
        try:
            self._system, path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError):
            raise
        except Exception:  # some kinds connect, or open a file, right here
            with self._explained(""):
                raise
        self._path = path.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def put(self, name: str, content: bytes | Path, *, create: bool = False) -> bool:
        if not create:
            self._patiently(name, lambda: self._put(name, content))
            return True
        with self._explained(name):
            if self._system.exists(self._at(name)):
                return False
            self._put(name, content)
        return True

    def _put(self, name: str, content: bytes | Path) -> None:
        path, content = self._at(name), self._readable(name, content)
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        if isinstance(content, Path):
            self._system.put_file(str(content), path)
        else:
            self._system.pipe_file(path, content)

    def get(self, name: str) -> bytes:
        return self._patiently(name, lambda: bytes(self._system.cat_file(self._at(name))))

    def ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        return self._patiently(name, lambda: [self._system.cat_file(self._at(name), start=start, end=stop) for start, stop in ranges])

    def sizes(self, prefix: str = "") -> dict[str, int]:
        def read() -> dict[str, int]:
            self._system.invalidate_cache()
            found = self._system.find(self._at(prefix), detail=True)
            skip = len(self._path) + 1
            return {name[skip:]: facts["size"] for name, facts in found.items()}

        return self._patiently(prefix, read)

    def folders(self) -> list[str]:
        def read() -> list[str]:
            self._system.invalidate_cache()
            try:
                found = self._system.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"]

        return self._patiently("", read)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(MissingObjectError):
                self._patiently(name, lambda name=name: self._system.rm_file(self._at(name)))
