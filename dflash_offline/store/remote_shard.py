"""A shard file in an object store, read like one on a local disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_offline.errors import StoreDamagedError

if TYPE_CHECKING:
    from dflash_offline.store.remote import Remote


@dataclass(frozen=True)
class RemoteShard:
    """Ranges of one shard file: from kept blocks, or fetched in whole blocks, which are kept."""

    remote: "Remote"
    name: str
    key: str
    size: int

    def __str__(self) -> str:
        return f"{self.remote.url}/{self.name}"

    def __enter__(self) -> "RemoteShard":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def preadv(self, buffers: Sequence[Any], offset: int) -> int:
        """Fill the buffers from byte ``offset`` on; returns how many bytes there were."""
        cache, missing, length = self.remote.cache, [], sum(memoryview(buffer).nbytes for buffer in buffers)
        if offset + length > self.size:
            return max(0, self.size - offset)  # as of a file cut short; nothing is filled
        for block, first, views in self._by_block([memoryview(buffer).cast("B") for buffer in buffers], offset):
            size = min(cache.block_bytes, self.size - block * cache.block_bytes)
            if not cache.read(self.key, block, views, first, size):
                missing.append((block, first, views, size))
        starts = [(block * cache.block_bytes, block * cache.block_bytes + size) for block, _, _, size in missing]
        for (block, first, views, size), content in zip(
            missing, self.remote.objects.ranges(self.name, starts) if missing else [], strict=True
        ):
            data = memoryview(content)
            if data.nbytes != size:
                raise StoreDamagedError(f"{self}: cut short, {data.nbytes:,} bytes where {size:,} were asked for")
            for view in views:
                view[:] = data[first : first + len(view)]
                first += len(view)
            cache.keep(self.key, block, data)
        return length

    def _by_block(self, views: list[memoryview], offset: int) -> Iterator[tuple[int, int, list[memoryview]]]:
        """Number of each block touched, where to begin in it, and the pieces of ``views`` that it fills."""
        block_bytes, held = self.remote.cache.block_bytes, []
        block, first = divmod(offset, block_bytes)
        begin = first
        for view in views:
            while len(view):
                piece, view = view[: block_bytes - first], view[block_bytes - first :]
                held.append(piece)
                first += len(piece)
                if first == block_bytes:
                    yield block, begin, held
                    block, begin, first, held = block + 1, 0, 0, []
        if held:
            yield block, begin, held
