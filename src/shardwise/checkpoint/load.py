"""Reads checkpoints into a sharded model and its optimizers, whoever wrote them. All is tested on all ranks before anything changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from shardwise.checkpoint import names, tree
from shardwise.checkpoint.collect import check_at_rest
from shardwise.checkpoint.folders import candidates, is_checkpoint, place_of, read_manifest_text
from shardwise.checkpoint.hugging_face import is_hugging_face, read_hugging_face
from shardwise.checkpoint.manifest import MANIFEST_NAME, Entry, Manifest, parse_manifest
from shardwise.checkpoint.match import Match, Matcher, state_slot
from shardwise.checkpoint.places import Place
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.restore import apply_values, check_values, drop_grads, fill
from shardwise.core.errors import CheckpointError, OffloadError, PathError, UsageError
from shardwise.runtime.engine import Engine
from shardwise.telemetry.meter import Place as LoopPlace
from shardwise.wire.comm import broadcast_bytes, gather_bytes

_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Request:
    """What is to be loaded, and how strictly."""

    place: Place
    optimizers: Sequence[Optimizer] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True
    weights_only: bool = False
    fallback: bool = False
    gradients: bool = True


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Args:
        path: Which checkpoint.
        step: Updates that were made when it was saved.
        num_ranks: How many ranks had saved it.
        plan: Under which plan.
        extra: The values that were saved as ``extra``; what objects with ``load_state_dict`` were given is not among them.
        missing: What the checkpoint has not, and was left as it is (``strict=False``).
        unexpected: What the checkpoint has for which there is no place.
        misshapen: What has other shapes, dtypes of another kind (whole numbers for fractions), or is of another kind of optimizer.
        is_fallback: Whether a newer one could not be used.
        num_bytes_read: What this rank has read of it: to test it, and to load it.
    """

    path: str
    step: int
    num_ranks: int
    plan: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshapen: tuple[str, ...] = ()
    is_fallback: bool = False
    num_bytes_read: int = 0


class _Unfit(CheckpointError):
    """The checkpoint is whole, but not of this model: an older one would not be either."""


_KINDS: dict[str, type[CheckpointError]] = {"unfit": _Unfit, "path": PathError, "checkpoint": CheckpointError}


def _kind_of(error: Exception) -> str:
    return next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "checkpoint")


def load_state(engine: Engine, request: Request) -> Loaded:
    """Load a training state. A collective.

    Raises:
        CheckpointError: There is no checkpoint that can be used; nothing was changed.
    """
    check_at_rest(engine, "load")
    meter, came_from = engine.meter, engine.meter.place
    meter.move(LoopPlace.ASIDE)
    engine.updates.give_up()
    engine.let_go()
    try:
        return _load(engine, request)
    finally:
        meter.move(came_from)


def _load(engine: Engine, request: Request) -> Loaded:
    paths = _agree_on_paths(engine, request)
    for number, path in enumerate(paths):
        try:
            return _load_from(engine, request, path, is_fallback=number > 0)
        except _Unfit:
            raise
        except CheckpointError as error:
            if not request.fallback or number + 1 == len(paths):
                raise
            if engine.lanes.rank == 0:
                _log.warning("%s Falling back to %s.", error, paths[number + 1])
    raise CheckpointError(f"{request.place.path} holds no checkpoint.")


def _agree_on_paths(engine: Engine, request: Request) -> list[str]:
    """What rank 0 finds: all ranks read the same, whatever is published meanwhile."""
    comm, answer = engine.lanes.gather, b""
    if comm.rank == 0:
        try:
            is_foreign = is_hugging_face(request.place)
            places = [request.place] if is_foreign else candidates(request.place, with_older=request.fallback)
            found = {"paths": [place.path for place in places]}
        except Exception as error:  # Whatever it is, the other ranks wait to hear of it.
            found = {"error": [str(error) or type(error).__name__, _kind_of(error)]}
        answer = json.dumps(found).encode()
    found = json.loads(broadcast_bytes(comm, answer, 0, label="where the checkpoint is"))
    if "error" in found:
        raise _KINDS[found["error"][1]](found["error"][0])
    paths: list[str] = found["paths"]
    return paths if request.fallback else paths[:1]


def _load_from(engine: Engine, request: Request, path: str, *, is_fallback: bool) -> Loaded:
    place, manifest = _read_manifest(engine, place_of(path))
    with Reader(place, manifest) as reader:
        error: CheckpointError | None = None
        match, values = Match(), {}
        try:
            match = _match(engine, request, manifest, path)
            reader.check(_ranges(match, reader))
            values = _decode(match, reader, engine)
        except CheckpointError as found:
            error = found
        except Exception as found:
            error = CheckpointError(f"{path} cannot be read: {type(found).__name__}: {found}")
        _agree(engine, error)
        if match.foreign_ranks and engine.lanes.rank == 0:
            _log.warning(
                "%s was saved by %d ranks, each with values of its own for %s; %d ranks load it, and take them in turns.",
                path, manifest.num_ranks, ", ".join(match.foreign_ranks), engine.lanes.size,
            )  # fmt: skip
        drop_grads(engine)
        engine.updates.forgive()
        engine.executor.before_change()
        if engine.disk is not None:
            engine.disk.forgive()
        with _agreeing(engine, path):
            fill(engine, request.optimizers, match, values, reader)
        engine.executor.refresh(engine.executor.units, with_frozen=True)
        if match.grads:
            engine.draw_digest()
        with _agreeing(engine, path):
            extra = apply_values(engine, request.extra, values, manifest.num_ranks)
    problems = match.problems
    return Loaded(
        path, manifest.summary.step, manifest.num_ranks, manifest.plan, extra,
        tuple(problems.missing), tuple(problems.unexpected), tuple(problems.misshapen), is_fallback, reader.num_bytes_read,
    )  # fmt: skip


def _decode(match: Match, reader: Reader, engine: Engine) -> dict[str, Any]:
    try:
        values = {name: tree.decode(value, reader.tensor) for name, value in match.values.items()}
        check_values(values, engine)
    except CheckpointError as error:
        raise CheckpointError(f"{reader.place.path}/{MANIFEST_NAME} cannot be used: {error}") from error
    return values


def _read_manifest(engine: Engine, place: Place) -> tuple[Place, Manifest]:
    """Rank 0 reads it for all. In a folder of another tool, files may be links."""
    comm, answer = engine.lanes.gather, b"!"
    if comm.rank == 0:
        try:
            is_own = is_checkpoint(place)
            answer = b"=" + read_manifest_text(place) if is_own else b"~" + read_hugging_face(place).to_text()
        except Exception as error:  # Whatever it is, the other ranks wait to hear of it.
            answer = b"!" + json.dumps([str(error) or type(error).__name__, _kind_of(error)]).encode()
    answer = broadcast_bytes(comm, answer, 0, label="the manifest of the checkpoint")
    if answer.startswith(b"!"):
        text, kind = json.loads(answer[1:])
        raise _KINDS[kind](text)
    manifest = parse_manifest(answer[1:], f"{place.path}/{MANIFEST_NAME}")
    return (place if answer.startswith(b"=") else place.following_links()), manifest


def _agree(engine: Engine, error: CheckpointError | None) -> None:
    """Go on together, or raise together what the first rank that cannot go on says."""
    mine = {} if error is None else {"error": str(error), "kind": _kind_of(error)}
    texts = gather_bytes(engine.lanes.gather, json.dumps(mine).encode(), label="whether the checkpoint can be read")
    for rank, facts in enumerate(map(json.loads, texts)):
        if "error" in facts:
            told = "" if rank == engine.lanes.rank else f"Rank {rank}: "
            raise _KINDS[facts["kind"]](f"{told}{facts['error']}") from (None if error is None else error.__cause__)


@contextmanager
def _agreeing(engine: Engine, path: str) -> Iterator[None]:
    """What a rank does by itself, and then all of them agree that it was done: so none waits in a collective for one that failed."""
    error: CheckpointError | None = None
    try:
        yield
    except Exception as found:
        error = CheckpointError(f"{path} was loaded in part only, since {type(found).__name__}: {found} Load again.")
        error.__cause__ = found
        if engine.disk is not None and isinstance(found, OffloadError):
            engine.disk.fail(error)
    _agree(engine, error)


def _match(engine: Engine, request: Request, manifest: Manifest, path: str) -> Match:
    matcher = Matcher(manifest, engine)
    matcher.match_model()
    if not request.weights_only:
        matcher.match_optimizers(request.optimizers)
        for key in request.extra:
            matcher.want(f"{names.EXTRA}{key}", f"extra {key!r}")
        for name in manifest.values:
            if name.startswith(names.EXTRA) and name not in matcher.found.values:
                matcher.want(name, name)
        for name in (names.RANDOM, names.ENGINE):
            if matcher.pick(name) is not None:
                matcher.want(name, name)
        matcher.found.foreign_ranks = [what for what in matcher.found.foreign_ranks if what != names.RANDOM]
        if request.gradients and not matcher.match_grads():
            raise _Unfit(
                f"{path} was saved by {manifest.num_ranks} ranks inside an accumulation (no_sync), of which each has gradients of "
                f"its own, but there are {engine.lanes.size} ranks. Load it with as many, or pass gradients=False to drop them."
            )
    problems = matcher.found.problems
    if problems and request.strict:
        hint = "Pass strict=False to load what fits"
        hint += "." if request.weights_only else ", or weights_only=True without optimizer and extra for the weights alone."
        raise _Unfit(f"{path} does not fit: {problems}. {hint}")
    return matcher.found


def _ranges(match: Match, reader: Reader) -> list[tuple[Entry, int, int]]:
    """All elements that are going to be read."""
    ranges = [(slot.entry, *slot.needed) for slot in match.slots]
    for found in match.optimizers.values():
        for each in found:
            for entry in each.values.values():
                if isinstance(entry, Entry) and each.state is not None and each.state.piece.numel:
                    ranges.append((entry, *state_slot(each.state.segment, entry, each.state).needed))
    for flat, entries in match.grads:
        for index, entry in entries.items():
            state = flat.params[index]
            if state.piece.numel:
                ranges.append((entry, *state_slot(state.segment, entry, state).needed))
    for _, entries in match.local_grads:
        ranges.extend((entry, 0, entry.numel) for entry in entries.values())
    for value in match.values.values():
        for name in tree.names_in(value):
            entry = reader.entry(name)
            ranges.append((entry, 0, entry.numel))
    return ranges


def check_options(request: Request) -> None:
    """Refuse what contradicts itself.

    Raises:
        UsageError: It does.
    """
    if request.weights_only and (request.optimizers or request.extra):
        raise UsageError("weights_only=True loads neither optimizer nor extra. Leave them out, or load all.")
