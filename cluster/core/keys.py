"""What cached blocks are called: key streams, reuse scopes and block keys.

KV at position i of a pool with lookahead span D is a function of tokens 0..i+D. So a pool's key stream has one unit per
position, and units 0..i determine, and are determined by, tokens 0..i+D:

    unit[0] = digest(t[0..D])          the leading window, as one digest (the raw token where D = 0)
    unit[i] = t[i+D]                   i >= 1

Known tokens t[0..n) give n - D units. The target pool and the cluster's directory use D = 0, a draft pool its own span;
that makes reuse exact where two prompts fork, at any distance from a block's end.

A block's key is sha256(parent key | its tagged units); the first block's parent is the stream's root, the digest of the
reuse scope and, where D > 0, of the leading window. Every field is length-prefixed: no two inputs encode alike.

Invariant: this is the only place that encodes tokens or hashes them. The worker's claim, probe and report, the
gateway and the router all call it, so they can't disagree."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from struct import iter_unpack

WORD = 4
"""Bytes of one token id in a packed sequence, little-endian."""

Contents = tuple[tuple[int, bytes], ...]
"""What a prompt has beside tokens (images, audio): the position and the digest of each."""

_UNITS, _WINDOW = b"U", b"W"


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """Within which KV may be shared. Two scopes that differ in any field never share a key.

    `model` is the fingerprint of all weights that the KV depends on. `contents` are the position and digest of
    everything in the prompt that isn't a token (images, audio): such a prompt shares with prompts that have the same
    contents."""

    model: str
    pool: str
    span: int
    kv_dtype: str
    block_size: int
    lora: str | None = None
    tenant_salt: bytes = b""
    contents: Contents = ()

    def root(self) -> bytes:
        """The 32-byte digest from which all keys of this scope descend."""
        return _root_of(self)


@lru_cache(maxsize=4096)
def _root_of(scope: ReuseScope) -> bytes:
    return sha256(_encode(tuple(getattr(scope, name) for name in scope.__slots__))).digest()


class TokenBuffer:
    """A growing token sequence, packed once and read by the key streams of all pools."""

    __slots__ = ("n_tokens", "packed")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.packed = bytearray()
        self.n_tokens = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds token ids. Raises ValueError, and adds nothing, if one is negative or has more than 32 bits."""
        try:
            words = array("I", tokens)
        except OverflowError as error:
            raise ValueError(f"token ids must be between 0 and {2**32 - 1}: {error}") from None
        if sys.byteorder == "big":
            words.byteswap()
        self.packed += words
        self.n_tokens += len(words)

    def tokens(self, start: int = 0, end: int | None = None) -> list[int]:
        """Token ids at positions [start, end)."""
        words = array("I", bytes(self.packed[WORD * start : None if end is None else WORD * end]))
        if sys.byteorder == "big":
            words.byteswap()
        return words.tolist()


class KeyStream:
    """The units of one token sequence as one pool sees it, and the keys of its full blocks.

    Units are read straight from the shared buffer, shifted by the span: no unit is ever copied or packed a second
    time, and keys are hashed once each, when first asked for."""

    __slots__ = ("_keys", "_root", "_scope_root", "block_size", "buffer", "span")

    def __init__(self, scope: ReuseScope, tokens: Iterable[int] | TokenBuffer = ()) -> None:
        """Tokens may be given as a buffer that other streams share; extending it extends them all."""
        self._scope_root = scope.root()
        self.span = scope.span
        self.block_size = scope.block_size
        self.buffer = tokens if isinstance(tokens, TokenBuffer) else TokenBuffer(tokens)
        self._root = None if self.span else self._scope_root
        self._keys: list[bytes] = []

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds known tokens, to every stream that shares the buffer."""
        self.buffer.extend(tokens)

    @property
    def n_units(self) -> int:
        """Units known: one per position whose KV is determined by the known tokens."""
        return max(0, self.buffer.n_tokens - self.span)

    @property
    def offset(self) -> int:
        """Byte offset in the packed buffer of the word of unit 0."""
        return WORD * self.span

    @property
    def root(self) -> bytes | None:
        """The parent of the first block's key, which stands for unit 0 too where the span isn't 0; None while it isn't
        known."""
        if self._root is None and self.n_units:
            window = bytes(self.buffer.packed[: WORD * (self.span + 1)])
            self._root = sha256(_encode((_WINDOW, self._scope_root, sha256(window).digest()))).digest()
        return self._root

    def units(self) -> list[bytes]:
        """All units, encoded: for tests and explanations, not for speed."""
        words = [bytes(self.words(i, i + 1)) for i in range(self.n_units)]
        if words and self.span:
            words[0] = sha256(bytes(self.buffer.packed[: WORD * (self.span + 1)])).digest()
        return words

    def words(self, start: int, end: int) -> bytearray:
        """The packed words of units [start, end), cut at what is known. Unit 0 of a span above 0 is word t[D] here: its
        window is in the root."""
        return self.buffer.packed[self.offset + WORD * start : self.offset + WORD * end]

    def block_units(self, index: int) -> bytes:
        """The packed words of one full block."""
        self._check_full(index)
        return bytes(self.words(index * self.block_size, (index + 1) * self.block_size))

    def block_key(self, index: int) -> bytes:
        """The 32-byte key of full block `index`. Raises IndexError if not all of its units are known."""
        return self.block_keys(index, index + 1)[0]

    def block_keys(self, start: int, end: int) -> list[bytes]:
        """Keys of the full blocks [start, end). Raises IndexError if not all units of the last one are known."""
        if end > start:
            self._check_full(end - 1)
        if end > len(self._keys):
            self._hash_up_to(end)
        return self._keys[start:end]

    @property
    def n_keys(self) -> int:
        """Blocks whose keys are known by now."""
        return len(self._keys)

    def adopt_keys(self, keys: Sequence[bytes]) -> None:
        """Takes the keys of the first blocks from a tree that holds exactly these blocks, instead of hashing them
        again."""
        if len(keys) > len(self._keys):
            self._keys[:] = keys

    def _check_full(self, index: int) -> None:
        if not 0 <= index < self.n_units // self.block_size:
            raise IndexError(f"block {index} isn't one of the {self.n_units // self.block_size} full blocks")

    def _hash_up_to(self, end: int) -> None:
        keys, root = self._keys, self.root
        if root is None:
            return
        parent = keys[-1] if keys else root
        width = WORD * self.block_size
        header = _UNITS + self.block_size.to_bytes(WORD, "little")
        first, last = self.offset + width * len(keys), self.offset + width * end
        with memoryview(self.buffer.packed)[first:last] as words:
            blocks = iter_unpack(f"{width}s", words)
            keys += [parent := sha256(parent + header + block).digest() for (block,) in blocks]


def raw_block_keys(scope: ReuseScope, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full blocks of `tokens`: what the cluster calls them. The scope is the target pool's, with span 0."""
    if scope.span:
        raise ValueError(f"span is {scope.span}, but raw keys have span 0: pass the scope of the target pool")
    stream = KeyStream(scope, tokens)
    return stream.block_keys(0, stream.n_units // scope.block_size)


def _encode(value: object) -> bytes:
    """A value as type tag, length and content. Injective over None, int, str, bytes and tuples of them."""
    match value:
        case None:
            tag, content = b"n", b""
        case int():
            tag, content = b"i", str(value).encode()
        case str():
            tag, content = b"s", value.encode()
        case bytes():
            tag, content = b"b", value
        case tuple():
            tag, content = b"t", b"".join(map(_encode, value))
        case _:
            raise TypeError(f"a reuse scope can't hold a {type(value).__name__}")
    return tag + len(content).to_bytes(8, "little") + content
