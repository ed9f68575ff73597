"""Proposer with a draft model: which rows of a step get how many draft tokens, and the runs of the model that make
them. It handles tokens and times, and is independent of tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.types import Batch, Row
from engine.executors.speculation.draft_costs import DraftCosts
from engine.executors.speculation.draft_model import SHORT, DraftModel, DraftRow, Run
from engine.executors.speculation.policy import DraftPolicy
from engine.executors.speculation.proposer import Drafts, Proposer, Requests
from engine.executors.speculation.requests import DraftedRequest, Verification
from engine.executors.speculation.verified_rows import RunningStep, VerifiedRow, only_continues, verified_rows

NUM_LEVELS = 4  # of how often the drafts of a request were correct lately


class DraftPlan(NamedTuple):
    """A row that gets drafts, and how many."""

    row: int  # its index in the step
    slot: int
    request: DraftedRequest
    num_drafts: int


class DraftModelProposer(Proposer):
    """Proposer that owns a draft model.

    The policy chooses the numbers of drafts before they are made, from the acceptance by position. The draft model
    reads the tokens of a request when it drafts for it for the first time, at most `chunk` tokens in a step.
    """

    method = "draft"

    def __init__(self, model: DraftModel, vocab_size: int):
        """Take the draft model, and the size of the vocabulary of the target model."""
        self.block_bytes = model.block_bytes
        self._model, self._vocab_size = model, vocab_size
        self._costs = DraftCosts()
        self._launched: list[DraftPlan] = []  # of a run whose drafts are not known yet
        self._ahead: list[tuple[DraftPlan, list[int]]] = []  # of a run for the next step, with placeholders
        self._draft_rows: dict[int, int] = {}  # places of slots in the last run, if it was not waited for

    def allocate(self, num_blocks: int) -> None:
        self._model.allocate(num_blocks)

    def place(self, batch: Batch, requests: Requests) -> None:
        self._model.place(batch)

    def propose(self, rows: Sequence[Row], requests: Requests, max_drafts: int, policy: DraftPolicy | None) -> Drafts:
        self.invested_s = 0.0
        if self._ahead:
            made = self._take_ahead(rows)
        elif policy and not policy.may_draft:
            return []
        else:
            plans = self._plans(rows, requests, max_drafts, policy)
            step_s = policy.step_s(len(rows)) if policy else float("inf")
            made = self._make(plans, step_s) if plans else []
        for plan, tokens in made:
            plan.request.set_drafts(tokens, _level(plan.request))
        return [(plan.row, tokens) for plan, tokens in made if tokens]

    def propose_ahead(self, running: RunningStep, batch: Batch, requests: Requests, policy: DraftPolicy | None) -> bool:
        if not self._model.can_run_ahead or (policy and not policy.may_draft):
            return False
        verified = verified_rows(running.rows, requests, self._draft_rows)
        if not only_continues(batch, verified) or not self._has_room(batch.rows, requests, verified):
            return False
        plans = self._plans(batch.rows, requests, batch.max_drafts, policy)
        if not plans or any(plan.request.samples_by_tokens or not self._has_read(plan) for plan in plans):
            return False
        self.place(batch, requests)
        rows = [self._row_ahead(plan, verified[plan.slot], running.hidden_states) for plan in plans]
        assert self._model.launch
        ids = self._model.launch(rows, max(plan.num_drafts for plan in plans))
        self._ahead = list(zip(plans, ids, strict=True))
        self._draft_rows = {plan.slot: index for index, plan in enumerate(plans)}
        return True

    def _has_room(self, rows: Sequence[Row], requests: Requests, verified: Mapping[int, VerifiedRow]) -> bool:
        """Return whether the draft model can compute as many positions as the rows may have at most."""
        most = min(self._model.max_seq_len, self._model.cache.max_len) - 1 - max(row.max_drafts for row in rows)
        return all(len(requests[slot].token_ids) + each.num_drafts <= most for slot, each in verified.items())

    def _has_read(self, plan: DraftPlan) -> bool:
        """Return whether the draft model has read all known tokens of a request."""
        return self._model.cache.num_valid(plan.slot) == len(plan.request.token_ids)

    def _row_ahead(self, plan: DraftPlan, verified: VerifiedRow, states: Any) -> DraftRow:
        """Return a row that reads the tokens that a running step chooses for a request."""
        num_known, num_tokens = len(plan.request.token_ids), verified.num_drafts + 1
        num_answered = num_known + 1 - plan.request.prompt_len
        return DraftRow(plan.slot, num_known, [0] * num_tokens, True, num_answered, None, verified)

    def _take_ahead(self, rows: Sequence[Row]) -> list[tuple[DraftPlan, list[int]]]:
        """Return the drafts of the run that was launched before the rows were known, as many as fit behind them."""
        made = []
        for plan, ids in self._ahead:
            row = rows[plan.row]
            count = max(min(plan.num_drafts, row.max_drafts, plan.request.max_len - 1 - row.start), 0)
            made.append((plan._replace(num_drafts=count), ids[:count]))
            self._mark_read(plan)
        self._launched, self._ahead = [plan for plan, _ in made], []
        return [(plan, ids) for plan, ids in made if ids]

    def _mark_read(self, plan: DraftPlan) -> None:
        """Record that the draft model has read all tokens of a request."""
        self._model.cache.start(plan.slot, plan.request.token_ids)
        self._model.cache.advance(plan.slot, len(plan.request.token_ids))

    def resolve(self) -> Drafts:
        launched, self._launched = self._launched, []
        found: Drafts = []
        for plan, tokens in zip(launched, self._model.wait() if launched else (), strict=True):
            if not plan.num_drafts:
                continue
            self._extend(plan, [], tokens)
            # All of them: an id that the target model does not have is never accepted.
            found.append((plan.row, tokens[: plan.num_drafts]))
            plan.request.set_drafts(found[-1][1], _level(plan.request))
        return found

    def learn(self, verifications: Sequence[Verification], policy: DraftPolicy, gain_s: float, step_s: float) -> None:
        for request, level, num_drafts, num_accepted in verifications:
            request.record(policy.acceptance, level, num_accepted, min(num_accepted + 1, num_drafts))
        self._costs.repay(gain_s, step_s)

    def _plans(
        self, rows: Sequence[Row], requests: Requests, max_drafts: int, policy: DraftPolicy | None
    ) -> list[DraftPlan]:
        """Return the rows that get drafts, each with as many as the policy chooses or else as many as it may have. With
        a policy there are none beside prompts."""
        plans = self._possible_plans(rows, requests, max_drafts)
        if not plans or not policy:
            return plans
        if any(len(row.token_ids) > row.num_sampled for row in rows):
            return []
        levels = [(_level(plan.request), plan.num_drafts) for plan in plans]
        counts = policy.choose_for(rows, levels)
        return [plan._replace(num_drafts=count) for plan, count in zip(plans, counts, strict=True) if count]

    def _possible_plans(self, rows: Sequence[Row], requests: Requests, max_drafts: int) -> list[DraftPlan]:
        """Return the rows that may have drafts, each with as many as it may have."""
        plans = []
        for index, row in enumerate(rows):
            request = requests[row.slot]
            count = min(row.max_drafts, request.max_len - 1 - row.start)
            count = min(count, self._model.max_seq_len - len(request.token_ids) + 1)
            request.defer_unless(count > 0)
            if (count := min(count, max_drafts)) > 0:
                plans.append(DraftPlan(index, row.slot, request, count))
                max_drafts -= count
        return plans

    def _make(self, plans: Sequence[DraftPlan], step_s: float) -> list[tuple[DraftPlan, list[int]]]:
        """Return the draft tokens of the rows, or placeholders for them if the run need not be waited for. `step_s` is
        the time of a step without drafts."""
        may_launch = not any(plan.request.samples_by_tokens for plan in plans)
        rows, ready = self._first_rows(plans, step_s)
        if may_launch and ready and self._model.launch and all(len(row.token_ids) <= SHORT for row in rows):
            ids = self._run(self._model.launch, rows, max(plan.num_drafts for plan in ready))
            self._launched, self._draft_rows = ready, {plan.slot: index for index, plan in enumerate(ready)}
            return [(plan, each[: plan.num_drafts]) for plan, each in zip(ready, ids, strict=True)]
        self._draft_rows = {}
        return self._run_to_the_end(rows, ready)

    def _run_to_the_end(
        self, rows: Sequence[DraftRow], ready: Sequence[DraftPlan]
    ) -> list[tuple[DraftPlan, list[int]]]:
        """Run the draft model until each plan has its drafts. `rows` are those of the first run."""
        alive = made = [(plan, list[int]()) for plan in ready]
        while rows:
            left = max((plan.num_drafts - len(drafts) for plan, drafts in alive), default=0)
            for (plan, drafts), tokens in zip(alive, self._run(self._model.run, rows, left), strict=True):
                self._extend(plan, drafts, tokens)
            position = max((len(drafts) for _, drafts in alive), default=0)
            alive = [each for each in alive if len(each[1]) == position < each[0].num_drafts]
            rows = [self._next_row(plan, drafts) for plan, drafts in alive]
        return made

    def _extend(self, plan: DraftPlan, drafts: list[int], tokens: Sequence[int]) -> None:
        """Add the tokens of a run to the drafts of a row, up to their number and to the first that the target model
        does not have: padded vocabularies may have different sizes."""
        for token_id in tokens[: plan.num_drafts - len(drafts)]:
            if not 0 <= token_id < self._vocab_size:
                return
            drafts.append(token_id)
        for token_id in tokens[: len(drafts)][:-1]:
            self._model.cache.guess(plan.slot, token_id)

    def _first_rows(self, plans: Sequence[DraftPlan], step_s: float) -> tuple[list[DraftRow], list[DraftPlan]]:
        """Return the rows of the first run, and the plans that it samples for. The others only read tokens."""
        rows, ready, budget = [], [], self._model.chunk
        for plan in plans:
            token_ids = plan.request.token_ids
            start, end = self._model.cache.start(plan.slot, token_ids), len(token_ids)
            if end - start > SHORT:
                if not self._costs.may_read(end - start, step_s):
                    plan.request.defer_unless(False)
                    continue
                end = min(end, start + budget)
                budget -= end - start
            if end > start:
                samples, num_answered = end == len(token_ids), end - plan.request.prompt_len
                rows.append(DraftRow(plan.slot, start, token_ids[start:end], samples, num_answered))
                self._model.cache.advance(plan.slot, end)
                if samples:
                    ready.append(plan)
        return rows, ready

    def _next_row(self, plan: DraftPlan, drafts: Sequence[int]) -> DraftRow:
        self._model.cache.guess(plan.slot, drafts[-1])
        position = len(plan.request.token_ids) + len(drafts) - 1
        return DraftRow(plan.slot, position, drafts[-1:], True, position + 1 - plan.request.prompt_len)

    def _run(self, run: Run, rows: Sequence[DraftRow], num_drafts: int) -> list[list[int]]:
        began = time.perf_counter()
        tokens = run(rows, num_drafts)
        seconds, depth = time.perf_counter() - began, len(tokens[0]) if tokens else 1
        num_read = sum(len(row.token_ids) for row in rows if len(row.token_ids) > SHORT)
        self.invested_s += self._costs.observe(len(tokens), num_read, seconds, depth)
        return tokens


def _level(request: DraftedRequest) -> int:
    return min(int(NUM_LEVELS * request.share_correct), NUM_LEVELS - 1)
