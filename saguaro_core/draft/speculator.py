"""The draft's side of decoding as pure logic: it answers outcomes with speculations and builds the cache in between.

It knows no process and no link: a test can drive it by hand, a process polls its link between two forwards. Trunk
tokens live in cache slots equal to their positions; branch b at depth d lives in slot len(trunk) + d * B + b until a
hit moves it into the trunk.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from saguaro_core.draft.branches import Branches, Drafted
from saguaro_core.draft.messages import Begin, DraftSpan, Speculation
from saguaro_core.draft.proposer import Proposer
from saguaro_core.events import CacheOutcome, FallbackKind, SpanKind
from saguaro_core.fallback import FallbackChooser, NgramIndex
from saguaro_core.fan_out import CacheState, FanOutPlanner
from saguaro_core.models.runner import Runner, trunk_batch
from saguaro_core.verification import Outcome

# Draft streams of one round: fallback forward d uses lane d, branch pass d uses lane _BRANCH_LANES + d.
_BRANCH_LANES = 1024
# The power law is fitted where caches operate: a bonus token ranked beyond this counts as "not among the first 64".
RANKS_KEPT = 64


@dataclass(frozen=True, slots=True)
class _Unranked:
    """A finished round whose bonus token has not been ranked yet; `drafted_there` was drafted in the bonus token's
    place.
    """

    state: CacheState
    num_drafted: int
    outcome: Outcome
    rank_scores: Tensor | None
    drafted_there: int | None


class Speculator:
    """Speculates for one request at a time over one draft model."""

    def __init__(
        self,
        runner: Runner,
        token_ids: Tensor | None = None,
        clock: Callable[[], float] = time.perf_counter,
        device: torch.device | str = "cpu",
    ) -> None:
        self.runner, self.token_ids, self.clock, self.device = runner, token_ids, clock, device
        self.spans: list[DraftSpan] = []
        self.context: list[int] = []
        self.is_building = False
        self._build_started: float | None = None
        self._unranked: _Unranked | None = None

    def begin(self, request: Begin) -> Speculation:
        """Read the prompt and speculate for round 0: the compulsory miss."""
        self.request = request
        self.proposer = Proposer(
            request.sampling,
            request.speculation,
            num_columns=self.runner.vocabulary_size,
            token_ids=self.token_ids,
            device=self.device,
        )
        self.planner = FanOutPlanner(request.speculation)
        self.chooser = FallbackChooser(request.speculation.fallback)
        self.eos = set(request.eos_token_ids)
        self.context, self.cached, self.round_index = list(request.prompt_token_ids), 0, 0
        self.ngrams = NgramIndex(self.context)
        self.branches, self.drafted = Branches(), Drafted()
        self.spans, self._unranked, self._build_started = [], None, None
        self._prefill()
        return self._answer("compulsory", None, request.lookahead)

    def verified(self, round_index: int, outcome: Outcome, lookahead: int) -> Speculation:
        """Take the outcome of the round under verification and speculate for `round_index`, the next one."""
        self._observe(outcome)
        branch = self.branches.cache.lookup(outcome)
        self.round_index = round_index
        committed = [*self.drafted.token_ids[: outcome.accepted], outcome.bonus_token_id]
        self.context += committed
        self.ngrams.extend(committed)
        self.cached = min(self.cached, len(self.context) - 1)
        return self._answer("miss" if branch is None else "hit", branch, lookahead)

    # -- answering ------------------------------------------------------------------------------------------------

    def _answer(self, cache: CacheOutcome, branch: int | None, lookahead: int) -> Speculation:
        started = self.clock()
        looked_up, self.branches, is_sd = self.branches, Branches(), self.request.mode == "sd"
        count = max(0, min(lookahead, self.runner.context_length - len(self.context)))
        fallback: FallbackKind | None = None
        if branch is not None:
            self.drafted = self._promote(looked_up, branch, count)
        else:
            fallback, self.drafted = self._fall_back(count)
        ended = self._answered = self.clock()
        if fallback is not None and not is_sd:
            self._add_span("fallback", started, ended)
            self.chooser.observe_fallback(fallback, ended - started)
        is_exhausted = len(self.context) >= self.runner.context_length
        self.is_building = not is_sd and not is_exhausted
        return self._speculation(cache, fallback, looked_up, ended - started, is_exhausted)

    def _speculation(
        self,
        cache: CacheOutcome,
        fallback: FallbackKind | None,
        looked_up: Branches,
        seconds: float,
        is_exhausted: bool,
    ) -> Speculation:
        is_sd, drafted = self.request.mode == "sd", self.drafted
        distributions = torch.stack(drafted.distributions).cpu().float() if drafted.distributions else None
        spans, self.spans = tuple(self.spans), []
        return Speculation(
            epoch=self.request.epoch,
            round_index=self.round_index,
            token_ids=tuple(drafted.token_ids),
            q=tuple(drafted.q),
            distributions=b"" if distributions is None else distributions.numpy().tobytes(),
            cache=None if is_sd else cache,
            fallback=None if is_sd else fallback,
            fan_out=looked_up.fan_out,
            prepared=tuple((k, tuple(ids)) for k, ids in looked_up.cache.prepared()),
            draft_seconds=seconds,
            spans=spans,
            exhausted=is_exhausted,
        )

    def _promote(self, branches: Branches, branch: int, count: int) -> Drafted:
        """Move a prepared branch into the trunk; what is ready counts, even if it is shorter than asked for."""
        drafted = Drafted(state="hit")
        for draws in branches.draws[:count]:
            drafted.add(self.proposer, draws, branch)
            if drafted.token_ids[-1] in self.eos:
                break
        first = len(self.context) - 1
        rows = branches.slots_of(branch, len(drafted.token_ids))
        assert self.cached == first, (self.cached, first)
        if rows:
            self.runner.move(rows, first)
            self.cached += len(rows)
        return drafted

    def _fall_back(self, count: int) -> tuple[FallbackKind, Drafted]:
        """Speculate after a miss with the backup that the request or the measured times choose."""
        if self.request.mode != "sd" and self.chooser.choose() == "fast":
            token_ids = self.ngrams.propose(count)
            return ("ngram" if token_ids else "none"), Drafted(token_ids=token_ids)
        drafted = Drafted()
        fan_out = self.planner.shape(self.request.speculation.lookahead, "miss")
        for d in range(count):
            pending = (self.context + drafted.token_ids)[self.cached :]
            started = self.clock()
            logits = self._forward_trunk(pending, 1)
            position = len(self.context) + d
            drafted.add(self.proposer, self.proposer.draw(logits, [position], self.round_index, d, fan_out[d]), 0)
            if self.request.mode == "sd":
                self._add_span("step", started, self.clock())
            if drafted.token_ids[-1] in self.eos:
                break
        return ("neural" if drafted.token_ids else "none"), drafted

    # -- building -------------------------------------------------------------------------------------------------

    def build_step(self) -> bool:
        """One forward of the cache for the round under verification; False when nothing is left to build."""
        if not self.is_building:
            return False
        if self._build_started is None:
            self._build_started = self.clock()
            self._extend_trunk()
            self._rank_observation()
            self._plant()
        else:
            self._grow()
        self.is_building = not self.branches.is_complete
        if not self.is_building:
            self._end_build_span()
        return self.is_building

    def _extend_trunk(self) -> None:
        """Give every trunk token its keys and values, and every position of the speculation its ranking."""
        drafted = self.drafted
        pending = (self.context + drafted.token_ids)[self.cached :]
        missing = len(drafted.token_ids) + 1 - len(drafted.rank_scores)
        logits = self._forward_trunk(pending, missing)
        position = len(self.context) + len(drafted.rank_scores)
        drafted.rank_scores += self.proposer.rank_scores(logits, list(range(position, position + missing)))

    def _plant(self) -> None:
        """Choose which outcomes to prepare, and lay out their slots."""
        drafted = self.drafted
        fan_out = self.planner.shape(len(drafted.token_ids), drafted.state)
        outcomes = []
        for k, (count, rank_scores) in enumerate(zip(fan_out, drafted.rank_scores, strict=True)):
            # After a rejection the bonus cannot be the rejected token; after an end-of-turn token there is no next
            # round.
            excluded = self.eos | set(drafted.token_ids[k : k + 1])
            outcomes += [Outcome(k, token) for token in self.proposer.candidates(rank_scores, count, excluded)]
        num_passes = max(0, min(self.request.speculation.lookahead, self.runner.context_length - self.cached))
        self.branches = Branches.plant(outcomes, fan_out, len(self.context), self.cached, num_passes)

    def _grow(self) -> None:
        """One draft pass for all branches: every branch gets its next token."""
        branches, depth = self.branches, self.branches.cache.depth
        batch = branches.next_batch(self.proposer.target_ids)
        logits = self.runner.forward(batch)
        assert logits is not None
        num_cached = self.planner.shape(self.request.speculation.lookahead, "hit")[depth]
        predicted = (batch.positions[0] + 1).tolist()
        lane = _BRANCH_LANES + depth
        branches.add(self.proposer.draw(logits[0], predicted, self.round_index, lane, num_cached))

    # -- observing ------------------------------------------------------------------------------------------------

    def end(self) -> tuple[DraftSpan, ...]:
        """Forget the request; the spans that no speculation carried."""
        self._end_build_span()
        self.is_building = False
        spans, self.spans = tuple(self.spans), []
        return spans

    def _observe(self, outcome: Outcome) -> None:
        """Remember what the round showed; the ranking is read later, off the target's critical path."""
        self._end_build_span()
        drafted = self.drafted
        known = drafted.rank_scores[outcome.accepted] if outcome.accepted < len(drafted.rank_scores) else None
        next_drafted = next(iter(drafted.token_ids[outcome.accepted : outcome.accepted + 1]), None)
        self._unranked = _Unranked(drafted.state, len(drafted.token_ids), outcome, known, next_drafted)
        self.chooser.observe_round(drafted.state == "hit", outcome.accepted, self.clock() - self._answered)

    def _rank_observation(self) -> None:
        """Feed the last round to the fan-out's estimates: where among the candidates was the real bonus token?"""
        seen, self._unranked = self._unranked, None
        if seen is None:
            return
        rank, num_kept = None, 0
        if seen.rank_scores is not None:
            num_kept = RANKS_KEPT
            rank = self.proposer.rank(seen.rank_scores, seen.outcome.bonus_token_id, seen.drafted_there)
            rank = rank if rank is not None and rank <= num_kept else None
        self.planner.observe(seen.state, seen.num_drafted, seen.outcome.accepted, rank, num_kept)

    def _prefill(self) -> None:
        """Fill the cache with the prompt but its last token, in chunks; a prompt beyond the context is left out."""
        if len(self.context) > self.runner.context_length:
            return
        started = self.clock()
        while self.cached < len(self.context) - 1:
            end = min(self.cached + self.request.prefill_chunk, len(self.context) - 1)
            self._forward_trunk(self.context[self.cached : end], 0)
        self._add_span("prefill", started, self.clock())

    def _forward_trunk(self, pending: list[int], num_logits: int) -> Tensor:
        """Append tokens to the trunk: logits [num_logits, n] of the last of them."""
        logits = self.runner.forward(trunk_batch(pending, self.cached, num_logits))
        self.cached += len(pending)
        return torch.empty(0, self.runner.vocabulary_size) if logits is None else logits[0]

    def _end_build_span(self) -> None:
        if self._build_started is not None:
            self._add_span("build", self._build_started, self.clock())
            self._build_started = None

    def _add_span(self, kind: SpanKind, start: float, end: float) -> None:
        self.spans.append(DraftSpan(kind=kind, start=start, end=end, round_index=self.round_index))
