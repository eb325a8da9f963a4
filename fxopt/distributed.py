"""One plan for all ranks of a torch.distributed job, or plain Inductor on all of them.

Rank 0 measures; the others wait, take its plan, check its digest and compile it; when all have said that they can, all
use it. Everything goes through the process group's key-value store, never through a collective: ranks may compile in
another order, or a graph that no other rank has, and a rank that waits can give up. What is decided is decided by one
atomic write, so that no two ranks see it differently:

1. meet: every rank that reaches a graph says so. When the last one has, the graph has been `met`; a rank that has
   waited too long writes `alone` instead, and whoever reaches the graph later finds that and does not wait.
2. plan: rank 0 publishes its plan, or none.
3. verdict: every rank votes. The first refusal, or the first rank found dead, is the verdict; else it is `apply`.

A rank at work writes a sign of life each second, from a thread; one that has given none for the timeout is dead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fxopt.plan import Plan, PlanStoreError, parse_plan
from fxopt.torch_api import distributed as api

if TYPE_CHECKING:
    from profiler_core.profiles import Profile

STORE_FAILED = api.STORE_FAILED
#: rank that measures
LEADER = 0
#: characters of a plan in one value of the store, which takes 8 MiB at most (TCPStore's limit)
_PIECE = 2**20
_APPLY, _MET, _ALONE = "apply", "met", "alone"


class NoAgreement(RuntimeError):
    """The ranks do not run one plan; the message says why. Plain Inductor runs on this rank.

    usual: nothing went wrong, or what did has been said.
    """

    def __init__(self, reason: str, usual: bool = False) -> None:
        super().__init__(reason)
        self.usual = usual


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on for one graph.

    plan: its digest, "" where they run plain Inductor. reason: why they do, "" where they do not.
    """

    rank: int
    ranks: int
    measured_by: int
    plan: str = ""
    reason: str = ""


@dataclass
class Group:
    """The ranks of the default process group, as seen from this one.

    timeout: seconds that a rank waits for others to reach a graph (after each time that they did not, half as long),
    and for a sign of life. limit: seconds after which it gives up on ranks that are alive, too.
    """

    rank: int
    size: int
    store: Any
    timeout: float
    limit: float
    settled: dict[str, tuple[Plan | None, str]] = field(default_factory=dict)
    missed: int = 0
    warned: bool = False
    gathered: int = 0
    _keys: dict[str, list[str]] = field(default_factory=dict)

    def session(self, graph: str, key: str) -> Session:
        """The agreement about one graph.

        graph: what ranks know it by. key: of the plan on this rank, which tells apart what differs in weights alone:
        the second such is the second of every rank.
        """
        keys = self._keys.setdefault(graph, [])
        if key not in keys:
            keys.append(key)
        return Session(self, f"{graph[:32]}/{keys.index(key)}")


_current: tuple[Any, Group] | None = None


def current(timeout: float, time_limit: float) -> Group | None:
    """The job's ranks; None outside of a job of several. Its state lasts as long as the process group."""
    global _current
    world = api.default_group()
    if world is None:
        _current = None
        return None
    if _current is None or _current[0] is not world:
        rank, size = api.rank_and_size()
        _current = world, Group(rank, size, api.store("fxopt"), timeout, 0.0)
    group = _current[1]
    group.timeout = timeout
    # A candidate begun before the time limit is finished after it, and waiting for the device does not count.
    group.limit = 3 * time_limit + 10 * timeout
    return group


def gather_profiles(profile: Profile, timeout: float = 60.0) -> Profile | None:
    """The profiles of all ranks as one (`profiler_core.merge`), on rank 0; None on the others, which do not wait.

    To be called by every rank, equally often. Ranks whose profile has not come within `timeout` seconds are named in
    the notes. Outside of a job of several ranks `profile` itself.
    """
    from profiler_core import merge
    from profiler_core.profiles import Profile

    world = api.default_group()
    group = current(timeout, 0.0)
    if world is None or group is None or group.store is None:
        return profile
    group.gathered += 1

    def key(rank: int) -> str:
        return f"profiles/{group.gathered}/{rank}"

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "profile.json")
        if group.rank != LEADER:
            profile.save(file)
            _put(group.store, key(group.rank), file.read_text())
            return None
        found, ends = {LEADER: profile}, time.monotonic() + timeout
        for rank in range(group.size):
            if rank == LEADER:
                continue
            while not (arrived := group.store.check([key(rank)])) and time.monotonic() < ends:
                time.sleep(0.02)
            if arrived:
                file.write_text(_take(group.store, key(rank)))
                found[rank] = Profile.load(file)
    merged = merge(found)
    missing = [str(rank) for rank in range(group.size) if rank not in found]
    note = f"no profile came from rank {', '.join(missing)} within {timeout:g} s"
    return replace(merged, notes=(*merged.notes, note)) if missing else merged


def _put(store: Any, key: str, text: str) -> None:
    """A text of any length under `key`, which appears last; with its digest."""
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(key, json.dumps({"pieces": len(pieces), "sha256": _sha256(text)}))


def _take(store: Any, key: str) -> str:
    """What `_put` put there. ValueError where it is not what was put."""
    head = json.loads(store.get(key))
    text = b"".join(store.get(f"{key}/{number}") for number in range(int(head["pieces"]))).decode()
    if _sha256(text) != head["sha256"]:
        raise ValueError("what arrived is not what was sent: its digest differs")
    return text


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class Session:
    """One graph's way to an agreement: `meet`, then `publish` or `receive`, then `conclude`, in `alive()`.

    Every method raises NoAgreement where the ranks will run plain Inductor, and STORE_FAILED where the store is gone.
    """

    group: Group
    name: str

    @property
    def leads(self) -> bool:
        return self.group.rank == LEADER

    @property
    def settled(self) -> bool:
        """Whether the ranks have decided on this graph before."""
        return self.name in self.group.settled

    def settled_plan(self) -> Plan:
        """The plan that they decided on."""
        plan, reason = self.group.settled[self.name]
        if plan is None:
            raise NoAgreement(reason, usual=True)
        return plan

    def disagreement(self, error: NoAgreement) -> Agreement:
        return Agreement(self.group.rank, self.group.size, LEADER, reason=str(error))

    # -- the steps ------------------------------------------------------------------------------------------------

    def meet(self) -> None:
        """Returns when all ranks have reached this graph."""
        group = self.group
        if group.store is None:
            group.warned, told = True, group.warned
            raise self._failed("the process group has no store to agree through", usual=told)
        if group.store.add(self._key("arrived"), 1) == group.size:
            self._decide("meeting", _MET)
        wait = group.timeout / 2**group.missed
        self._wait(lambda: self._has("meeting"), (), wait)
        if self._decide("meeting", _ALONE) != _MET:
            group.missed += 1
            group.warned, told = True, group.warned
            arrived = group.store.add(self._key("arrived"), 0)
            raise self._failed(
                f"{arrived} of {group.size} ranks reached this graph within {wait:g} s (distributed_timeout)",
                usual=told,
            )
        group.missed = max(0, group.missed - 1)

    def publish(self, plan: Plan | None, settings: str, reason: str = "") -> None:
        """Rank 0: gives the others the plan and what it was decided under; or none, and why."""
        if plan is None:
            self._set("plan", json.dumps({"reason": reason}))
            self._failed(reason)
            return
        _put(self.group.store, self._key("content"), plan.content().decode())
        self._set("plan", json.dumps({"key": plan.key, "settings": settings}))

    def receive(self, settings: str) -> Plan:
        """The others: rank 0's plan, checked against its digest."""
        gone = self._wait(lambda: self._has("plan") or self._has("verdict"), (LEADER,), self.group.limit)
        if gone or self._has("verdict"):
            self.refuse(gone or self._get("verdict"))
        head = json.loads(self._get("plan"))
        if head.get("reason") is not None:
            raise self._failed(str(head["reason"]), usual=True)
        if head["settings"] != settings:
            self.refuse("its versions, passes or options are not those of rank 0")
        try:
            content = _take(self.group.store, self._key("content"))
            return parse_plan(content.encode(), head["key"], "the message of rank 0")
        except (PlanStoreError, ValueError) as error:
            self.refuse(str(error))

    def conclude(self, plan: Plan) -> Agreement:
        """Says that this rank can apply the plan, and waits for all others to say so."""
        group, digest = self.group, plan.digest()
        self._set(f"vote/{group.rank}", digest)
        votes = [self._key(f"vote/{rank}") for rank in range(group.size)]
        others = [rank for rank in range(group.size) if rank != group.rank]
        gone = self._wait(
            lambda: self._has("verdict") or group.store.check(votes),
            others,
            group.limit,
            excused=lambda rank: self._has(f"vote/{rank}"),
        )
        if gone:
            verdict = self._decide("verdict", gone)
        elif self._has("verdict"):
            verdict = self._get("verdict")
        else:
            found = {self._get(f"vote/{rank}") for rank in range(group.size)}
            verdict = self._decide("verdict", _APPLY if found == {digest} else "the ranks hold different plans")
        if verdict != _APPLY:
            raise self._failed(verdict)
        group.settled[self.name] = plan, ""
        return Agreement(group.rank, group.size, LEADER, digest)

    def refuse(self, reason: str) -> NoReturn:
        """Says that the ranks cannot run one plan: all of them fall back, for the reason that was given first."""
        mine = f"rank {self.group.rank}: {reason}" if not reason.startswith("rank ") else reason
        raise self._failed(self._decide("verdict", mine))

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Gives signs of life from a thread of its own, while the body compiles or measures."""
        stop, store = threading.Event(), self.group.store

        def beat() -> None:
            number = 0
            while store is not None:
                try:
                    store.set(self._life(self.group.rank), str(number))
                except STORE_FAILED:  # the body will find out
                    return
                if stop.wait(min(1.0, self.group.timeout / 5)):
                    return
                number += 1

        thread = threading.Thread(target=beat, name="fxopt-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(timeout=self.group.timeout)

    def give_up(self, reason: str) -> None:
        """Tells the others, as far as the store still can, that this rank will not take part any more."""
        with contextlib.suppress(*STORE_FAILED):
            self._decide("verdict", f"rank {self.group.rank}: {reason}")
        self.group.settled.setdefault(self.name, (None, reason))

    def lost(self, error: BaseException) -> NoAgreement:
        """What follows from a store that is gone: no agreement, on this graph or any other."""
        group = self.group
        group.store, group.warned, told = None, True, group.warned
        cause = str(error).partition("\n")[0]
        return self._failed(f"the process group's store is gone ({type(error).__name__}: {cause})", usual=told)

    # -- the store ------------------------------------------------------------------------------------------------

    def _failed(self, reason: str, usual: bool = False) -> NoAgreement:
        self.group.settled[self.name] = None, reason
        return NoAgreement(reason, usual)

    def _wait(
        self,
        done: Callable[[], bool],
        watched: Iterable[int],
        limit: float,
        excused: Callable[[int], bool] = lambda rank: False,
    ) -> str:
        """Returns "" once `done`, or when `limit` seconds are over and nobody is watched; else why waiting ended.

        Asks again and again: a blocking wait would hold the store's connection, which NCCL's own threads use too.
        """
        waited = looked = 0.0
        last = time.monotonic()
        seen: dict[int, tuple[str, float]] = {rank: ("", 0.0) for rank in watched}
        pause = 0.005
        while not done():
            # Where all processes were held up together (a suspended machine, SIGSTOP), nobody is dead for that.
            now = time.monotonic()
            waited, last = waited + min(1.0, now - last), now
            if waited > limit:
                return f"it took more than {limit:g} s" if seen else ""
            if waited - looked > min(1.0, self.group.timeout / 5):
                looked = waited
                for rank, (life, since) in seen.items():
                    key = self._life(rank)
                    latest = self.group.store.get(key).decode() if self.group.store.check([key]) else ""
                    if latest != life:
                        seen[rank] = latest, waited
                    elif waited - since > self.group.timeout and not excused(rank):
                        return f"rank {rank} has given no sign of life for {self.group.timeout:g} s"
            time.sleep(pause)
            pause = min(0.2, pause * 1.5)
        return ""

    def _decide(self, what: str, value: str) -> str:
        """What stands under `what`: `value`, unless another rank was first."""
        return str(self.group.store.compare_set(self._key(what), "", value).decode())

    def _key(self, what: str) -> str:
        return f"{self.name}/{what}"

    def _life(self, rank: int) -> str:
        return self._key(f"alive/{rank}")

    def _has(self, what: str) -> bool:
        return bool(self.group.store.check([self._key(what)]))

    def _get(self, what: str) -> str:
        return str(self.group.store.get(self._key(what)).decode())

    def _set(self, what: str, value: str) -> None:
        self.group.store.set(self._key(what), value)
