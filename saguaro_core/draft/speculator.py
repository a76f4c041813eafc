"""The draft's side of decoding as pure logic: it answers outcomes with speculations and builds the cache in between.

It knows no process and no link: a test can drive it by hand, a process polls its link between two forwards or two parts
of one. Trunk tokens live in cache slots equal to their positions, branches in the slots behind them. The trunk and what
answers taught outlive requests; everything else belongs to one.

Whatever needs forwards is written in steps that yield them: the speculators of a batch make theirs together.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from saguaro_core.draft.branches import Branches, Drafted
from saguaro_core.draft.lessons import Lessons
from saguaro_core.draft.messages import Begin, DraftSpan, Speculation
from saguaro_core.draft.proposer import Place, Proposer
from saguaro_core.draft.spans import SpanLog
from saguaro_core.draft.text_memory import Experience, Guess, TextMemory
from saguaro_core.events import CacheOutcome, DraftEstimates, FallbackKind, Served
from saguaro_core.models.runner import DivisibleRunner, Runner, trunk_batch
from saguaro_core.models.steps import Steps, drive
from saguaro_core.ngrams import MAX_NGRAM
from saguaro_core.trunk import Trunk
from saguaro_core.verification import Outcome


class Speculator:
    """Speculates for one request at a time over one draft model. `experience` is shared with others of that draft."""

    def __init__(
        self,
        runner: Runner,
        token_ids: Tensor | None = None,
        clock: Callable[[], float] = time.perf_counter,
        device: torch.device | str = "cpu",
        experience: Experience | None = None,
    ) -> None:
        self.runner, self.token_ids, self.clock, self.device = runner, token_ids, clock, device
        self.trunk, self.experience = Trunk(runner), Experience() if experience is None else experience
        self._num_parts = runner.num_parts if isinstance(runner, DivisibleRunner) else 1
        self.next_rows: list[int] = []
        self.spans = SpanLog()
        self.context: list[int] = []
        self.is_building = False

    @property
    def cached(self) -> int:
        """How many slots of the trunk are valid."""
        return len(self.trunk)

    def begin(self, request: Begin) -> Speculation:
        """Read the prompt and speculate for round 0: the compulsory miss."""
        return drive(self.runner, self.begin_in_steps(request))

    def begin_in_steps(self, request: Begin, batch_size: int = 1) -> Steps[Speculation]:
        """begin, in steps, for one of `batch_size` sequences that wait for each other."""
        self.request = request
        self.proposer = Proposer(
            request.sampling,
            request.speculation,
            num_columns=self.runner.vocabulary_size,
            token_ids=self.token_ids,
            device=self.device,
        )
        must_be_full = request.mode == "sd" or self.proposer.draws_tokens
        self.lessons = Lessons(request.speculation, batch_size, must_be_full=must_be_full)
        self.planner, self.chooser, self.times = self.lessons.planner, self.lessons.chooser, self.lessons.times
        self.eos = set(request.eos_token_ids)
        self.context, self.round_index = list(request.prompt_token_ids), 0
        copying = request.speculation.copying == "ngram"
        self.memory = TextMemory(self.context, self.experience, self.proposer, copying=copying)
        self.branches, self.drafted = Branches(), Drafted()
        self.spans = SpanLog()
        if not request.reuse_prefix:
            self.trunk.forget()
        self._estimates = DraftEstimates(num_reused=self.trunk.reuse(self.context))
        yield from self._prefill()
        answer = yield from self._answer("compulsory", None, request.lookahead)
        self._last_verdict = self._answered
        return answer

    def verified(self, round_index: int, outcome: Outcome, lookahead: int, verify_seconds: float = 0.0) -> Speculation:
        """Take the outcome of the round under verification and speculate for `round_index`, the next one.

        verify_seconds: the target's own time for the round; 0 if it does not say: then no length is cut by value.
        """
        return drive(self.runner, self.verified_in_steps(round_index, outcome, lookahead, verify_seconds))

    def verified_in_steps(
        self, round_index: int, outcome: Outcome, lookahead: int, verify_seconds: float = 0.0
    ) -> Steps[Speculation]:
        """verified, in steps."""
        if self.proposer.draws_tokens and self.is_building and not self.spans.is_open:
            # Whether a round hits must follow from its outcome, not from how far the draft had come.
            yield from self._start_build()
        self._observe(outcome, verify_seconds)
        branch = self.branches.cache.lookup(outcome, least=0 if self.proposer.draws_tokens else 1)
        self.round_index = round_index
        committed, q = [*self.drafted.token_ids[: outcome.accepted], outcome.bonus_token_id], self.drafted.q
        self.context += committed
        self.trunk.keep(len(self.context) - 1)
        if branch is None:
            self.memory.learn(committed, q)
            return (yield from self._answer("miss", None, lookahead))
        # A branch is drafted on as it was begun: what its tokens are must not depend on when they are made.
        answer = yield from self._answer("hit", branch, lookahead)
        self.memory.learn(committed, q)
        return answer

    # -- answering ------------------------------------------------------------------------------------------------

    def _answer(self, cache: CacheOutcome, branch: int | None, lookahead: int) -> Steps[Speculation]:
        started = self.clock()
        looked_up, self.branches = self.branches, Branches()
        count = max(0, min(lookahead, self.runner.context_length - len(self.context)))
        fallback: FallbackKind | None = None
        if branch is not None:
            self.drafted = yield from self._serve(looked_up, branch, count)
        else:
            fallback, self.drafted = yield from self._fall_back(count)
        ended = self._answered = self.clock()
        is_sd = self.request.mode == "sd"
        if fallback is not None and not is_sd:
            self.spans.add("fallback", started, ended, self.round_index)
        is_exhausted = len(self.context) >= self.runner.context_length
        self.is_building = not is_sd and not is_exhausted
        return self._pack(
            None if is_sd else cache,
            None if is_sd else fallback,
            None if is_sd else self.drafted.served(count, self.eos),
            looked_up,
            ended - started,
        )

    def _pack(
        self,
        cache: CacheOutcome | None,
        fallback: FallbackKind | None,
        served: Served | None,
        looked_up: Branches,
        seconds: float,
    ) -> Speculation:
        return Speculation(
            epoch=self.request.epoch,
            round_index=self.round_index,
            token_ids=tuple(self.drafted.token_ids),
            q=tuple(self.drafted.q),
            distributions=self.drafted.distribution_bytes(),
            cache=cache,
            fallback=fallback,
            fan_out=looked_up.fan_out,
            prepared=tuple((k, tuple(ids)) for k, ids in looked_up.cache.prepared()),
            draft_seconds=seconds,
            spans=self.spans.take(),
            exhausted=len(self.context) >= self.runner.context_length,
            served=served,
            estimates=self._estimates,
        )

    def _serve(self, branches: Branches, branch: int, count: int) -> Steps[Drafted]:
        """Move a prepared branch into the trunk and make it as long as it should be served."""
        drafted, drawn = Drafted(state="hit", source="hit"), branches.drawn[branch][:count]
        wanted = self.lessons.length(branches.q_of(branch), count)
        for draws, row in drawn[:wanted]:
            drafted.add(self.proposer, draws, row)
            if drafted.token_ids[-1] in self.eos:
                break
        assert self.cached == len(self.context) - 1, (self.cached, len(self.context))
        fed = [self.context[-1], *drafted.token_ids[:-1]][: len(drafted.token_ids)]
        self.trunk.move(branches.slots[branch][: len(fed)], fed)
        if wanted == len(drawn):
            yield from self._go_on(drafted, count, lambda depth: branches.place_at(branch, depth))
        return drafted

    def _fall_back(self, count: int) -> Steps[tuple[FallbackKind, Drafted]]:
        """Speculate after a miss with the backup that the request or the measured times choose."""
        started, is_sd = self.clock(), self.request.mode == "sd"
        if not is_sd and self.lessons.prefers_lookup():
            drafted = self._look_up(count)
        else:
            drafted = Drafted(source="neural")
            fan_out = self.planner.shape(self.request.speculation.lookahead, "miss")
            yield from self._go_on(
                drafted, count, lambda depth: Place(self.round_index, depth, num_cached=fan_out[depth])
            )
        kind: FallbackKind = "none"
        if drafted.token_ids and drafted.source is not None and drafted.source != "hit":
            kind = drafted.source
        # A round without a speculation counts as the fast backup's, which may find nothing.
        self.chooser.observe_fallback("neural" if kind == "neural" else "fast", self.clock() - started)
        return kind, drafted

    def _look_up(self, count: int) -> Drafted:
        found, token_ids = self.memory.look_up(count)
        token_ids = token_ids[: self.lessons.lookup_length(found, len(token_ids))]
        return Drafted(token_ids=token_ids, source=found) if found != "none" and token_ids else Drafted()

    def _go_on(self, drafted: Drafted, most: int, place: Callable[[int], Place]) -> Steps[None]:
        """Make the speculation longer while that is worth the target's time: by tokens of the draft, a forward each,
        then by what the text alone suggests.
        """
        while len(drafted.token_ids) < most and self.eos.isdisjoint(drafted.token_ids[-1:]):
            guess = self._guess(drafted)
            choice = self.lessons.next_token(drafted, 0.0 if guess is None else guess.share)
            if choice == "guess" and guess is not None:
                if not drafted.token_ids:
                    drafted.source = guess.kind
                drafted.guess(guess.token_id, guess.share)
            elif choice == "drafted":
                yield from self._draft(drafted, place(len(drafted.token_ids)))
            else:
                return

    def _guess(self, drafted: Drafted) -> Guess | None:
        """What the text alone suggests after a speculation, where that is wanted."""
        is_hit = drafted.source == "hit"
        if not (self.lessons.guesses_after_hit if is_hit else self.lessons.guesses_after_miss):
            return None
        return self.memory.guess([*self.context[-MAX_NGRAM:], *drafted.token_ids], after_hit=is_hit)

    def _draft(self, drafted: Drafted, place: Place) -> Steps[None]:
        """One more token of the draft."""
        started, position = self.clock(), len(self.context) + len(drafted.token_ids)
        missing = [*self.context[self.cached :], *drafted.token_ids[max(0, self.cached - len(self.context)) :]]
        logits = yield from self._forward(missing, 1)
        logits = self.memory.mix_tails(logits, [[*self.context[-MAX_NGRAM:], *drafted.token_ids]])
        drafted.add(self.proposer, self.proposer.draw(logits, [position], [place]), 0)
        ended = self.clock()
        self.times.observe_step(ended - started)
        if self.request.mode == "sd":
            self.spans.add("step", started, ended, self.round_index)

    # -- building -------------------------------------------------------------------------------------------------

    def build_step(self) -> bool:
        """One forward of the cache for the round under verification; False when nothing is left to build."""
        return drive(self.runner, self.build_in_steps())

    def build_in_steps(self) -> Steps[bool]:
        """build_step, in steps."""
        if not self.is_building:
            return False
        if not self.spans.is_open:
            yield from self._start_build()
        else:
            yield from self._grow()
        self.next_rows = self._next_branches()
        self.is_building = bool(self.next_rows)
        if not self.is_building:
            self.spans.close("build", self.clock())
        return self.is_building

    def _start_build(self) -> Steps[None]:
        self.spans.open(self.clock(), self.round_index)
        yield from self._extend_trunk()
        self.lessons.read_ranking(self.proposer)
        self._estimates = self.lessons.estimates(self._estimates.num_reused)
        self._plant()

    def _extend_trunk(self) -> Steps[None]:
        """Give every trunk token its keys and values, and every position of the speculation its ranking."""
        drafted = self.drafted
        missing = len(drafted.token_ids) + 1 - len(drafted.rank_scores)
        text = self.context + drafted.token_ids
        logits = self.memory.mix((yield from self._forward(text[self.cached :], missing)), text)
        drafted.rank_scores += self.proposer.rank_scores(logits, list(range(len(text) + 1 - missing, len(text) + 1)))

    def _plant(self) -> None:
        """Choose which outcomes to prepare."""
        lookahead = self.request.speculation.lookahead
        fan_out, ranked = self.lessons.likely_outcomes(self.drafted, self.proposer, self.eos)
        self.branches = Branches.plant(
            ranked,
            fan_out,
            num_context=len(self.context),
            trunk_length=self.cached,
            longest=max(0, min(lookahead, self.runner.context_length - self.cached)),
            round_index=self.round_index,
            next_fan_out=self.planner.shape(lookahead, "hit"),
        )

    def _next_branches(self) -> list[int]:
        """The branches that the next pass takes: all that can grow, or, once each has a token, those worth its time."""
        branches = self.branches
        if self.request.speculation.deepening == "all" or branches.used == branches.trunk_length:
            return branches.unfinished()
        elapsed = self.clock() - self._answered
        return self.lessons.worthy_branches(branches, len(self.drafted.token_ids), elapsed, self._num_parts)

    def _grow(self) -> Steps[None]:
        """One draft pass: each of the branches chosen for it gets its next token."""
        started, branches, chosen = self.clock(), self.branches, self.next_rows
        batch = branches.next_batch(chosen, self.proposer.target_ids)
        logits = yield batch
        assert logits is not None
        text, ids = self.context[-MAX_NGRAM:], self.proposer.target_ids
        tails = [branches.text(branch, text, self.drafted.token_ids, ids) for branch in chosen]
        places = [branches.place(branch) for branch in chosen]
        draws = self.proposer.draw(self.memory.mix_tails(logits[0], tails), (batch.positions[0] + 1).tolist(), places)
        branches.add(chosen, draws)
        self.times.branch_pass.add(len(chosen), self.clock() - started)

    # -- observing ------------------------------------------------------------------------------------------------

    def end(self) -> tuple[DraftSpan, ...]:
        """Forget the request; the spans that no speculation carried."""
        self.spans.close("build", self.clock())
        self.is_building = False
        return self.spans.take()

    def _observe(self, outcome: Outcome, verify_seconds: float) -> None:
        self.spans.close("build", self.clock())
        now = self.clock()
        waited, seconds, self._last_verdict = now - self._answered, now - self._last_verdict, now
        self.lessons.observe(self.drafted, outcome, verify_seconds, waited, seconds)

    def _prefill(self) -> Steps[None]:
        """Fill the cache with the prompt but its last token, in chunks; a prompt beyond the context is left out."""
        if len(self.context) > self.runner.context_length:
            return
        started = self.clock()
        while self.cached < len(self.context) - 1:
            end = min(self.cached + self.request.prefill_chunk, len(self.context) - 1)
            yield from self._forward(self.context[self.cached : end], 0)
        self.spans.add("prefill", started, self.clock(), self.round_index)

    def _forward(self, pending: list[int], num_logits: int) -> Steps[Tensor]:
        """Append tokens to the trunk: logits [num_logits, n] of the last of them."""
        logits = yield trunk_batch(pending, self.cached, num_logits)
        self.trunk.append(pending)
        return torch.empty(0, self.runner.vocabulary_size) if logits is None else logits[0]
