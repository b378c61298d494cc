"""Deliberate bugs of the core: one edit each, with the test that is there to catch it.

`run.py` applies them to a copy of the sources. An edit names text that occurs exactly once, so that a bug whose place
has changed is reported instead of being skipped."""

from dataclasses import dataclass

REUSE = "tests/unit/core/test_traps_reuse.py::test_trap_"
TRANSACTION = "tests/unit/core/test_traps_transaction.py::test_trap_"
TREE = "tests/unit/core/test_prefix_tree.py::test_"
ADMISSION = "tests/unit/core/test_admission.py::test_"
CACHE = "tests/unit/core/test_paired_cache.py::test_"
REPORTS = "tests/unit/core/test_frontier_reports.py::test_"
WINDOWS = "tests/unit/core/test_windows.py::test_"
CLAIM = "tests/unit/core/test_claiming.py::test_"
DRAFTS = "tests/unit/core/test_drafts.py::test_"
ADMISSION_LIVES = "tests/property/test_admission_machine.py::TestAdmission"
RANDOM_LIVES = "tests/property/test_paired_cache_machine.py::TestPairedCache"


@dataclass(frozen=True)
class Bug:
    """Replace `old` by `new` in `cluster/core/<file>`; `test` must fail then."""

    what: str
    file: str
    old: str
    new: str
    test: str


BUGS = (
    Bug(
        "publish a block before its last position is computed",
        "holding.py",
        "complete = self.cursor // self.block_size",
        "complete = -(-self.cursor // self.block_size)",
        REUSE + "25_rejected_drafts_are_never_published",
    ),
    Bug(
        "publish draft KV whose lookahead isn't known",
        "holding.py",
        " or cursor > self.stream.n_units:",
        ":",
        CACHE + "positions_whose_lookahead_is_unknown_cannot_be_committed",
    ),
    Bug(
        "the same, in random lives of requests",
        "holding.py",
        " or cursor > self.stream.n_units:",
        ":",
        RANDOM_LIVES,
    ),
    Bug(
        "publish what was computed without the KV of a hole",
        "holding.py",
        "complete > self.published and self.reuse and self.hole is None:",
        "complete > self.published and self.reuse:",
        RANDOM_LIVES,
    ),
    Bug(
        "publish such a tail at the end",
        "holding.py",
        " or not self.reuse or self.hole is not None:",
        " or not self.reuse:",
        CLAIM + "nothing_after_a_hole_is_published_but_the_targets_blocks_are",
    ),
    Bug(
        "leave a hole that ends inside a block",
        "claiming.py",
        "    while start % size or start != _joint",
        "    while start != _joint",
        CLAIM + "a_hole_takes_no_blocks_and_both_pools_start_behind_it",
    ),
    Bug(
        "forget the growth of the pools before the one that failed",
        "paired_cache.py",
        "zip(holdings[:done], taken, strict=False)",
        "zip(holdings[:0], taken, strict=False)",
        TRANSACTION + "12_a_third_pool_that_fails_gives_both_growths_back",
    ),
    Bug(
        "feed the draft positions that the chunk didn't compute",
        "batch_plan.py",
        "min(self.draft_limit, self.shape.real_slots(self.known + num_new))",
        "self.shape.real_slots(self.known + num_new)",
        REUSE + "06_draft_kv_does_not_depend_on_chunks",
    ),
    Bug(
        "raw keys with a back-off of D tokens, instead of exact ones",
        "keys.py",
        "        return WORD * self.span\n",
        "        return 0\n",
        REUSE + "02_no_draft_cell_that_depends_on_the_fork_is_reused",
    ),
    Bug(
        "leave the leading window out of the draft's root",
        "keys.py",
        "_encode((_WINDOW, self._scope_root, sha256(window).digest()))",
        "_encode((_WINDOW, self._scope_root, len(window)))",
        REUSE + "02_a_difference_in_the_leading_window_alone_keeps_all_draft_cells_apart",
    ),
    Bug(
        "copy one unit too few on copy-on-write",
        "holding.py",
        "page, self.cursor - full)",
        "page, self.cursor - full - 1)",
        REUSE + "04_the_same_prompt_again_reuses_all_but_the_last_positions",
    ),
    Bug(
        "reuse the last prompt token, whose logits are needed",
        "claiming.py",
        "    return max(0, handle.tokens.n_tokens - 1)\n",
        "    return handle.tokens.n_tokens\n",
        REUSE + "04_the_same_prompt_again_reuses_all_but_the_last_positions",
    ),
    Bug(
        "let positions be written that lie in shared blocks",
        "holding.py",
        "        return self.published * self.block_size",
        "        return min(self.cursor, self.published * self.block_size)",
        REUSE + "01_the_joint_depth_is_the_smaller_one",
    ),
    Bug(
        "start each pool where it is, though the draft needs hidden states",
        "claiming.py",
        "    return [joint] * len(most)\n",
        "    return [each.depth(min(most)) for each in handle.holdings.values()]\n",
        REUSE + "01_the_joint_depth_is_the_smaller_one",
    ),
    Bug(
        "evict the most recently used first",
        "eviction.py",
        "return next(iter(self._order), None)",
        "return next(reversed(self._order), None)",
        TREE + "the_least_recently_used_block_goes_first_and_the_end_before_the_beginning",
    ),
    Bug(
        "let a path's beginning rank below its end",
        "prefix_tree.py",
        "            run.score = max(run.score, score)\n",
        "            run.score = score\n",
        TREE + "an_important_branch_keeps_the_beginning_that_it_needs",
    ),
    Bug(
        "give a reservation back twice",
        "paired_cache.py",
        "        if not reservation.open:\n            return\n",
        "",
        TRANSACTION + "14_reverting_twice_gives_back_once",
    ),
    Bug(
        "lose one's own block when an equal one is published",
        "holding.py",
        "            self.pool.give_back([mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs])\n",
        "",
        TREE + "two_that_compute_the_same_end_up_with_the_same_blocks",
    ),
    Bug(
        "suspend the draft only",
        "paired_cache.py",
        "for holding in handle.holdings.values():\n                holding.release()",
        "for holding in [*handle.holdings.values()][1:]:\n                holding.release()",
        TRANSACTION + "17_suspend_resume_and_free_hit_both_pools",
    ),
    Bug(
        "claim again without giving back what was claimed first",
        "claiming.py",
        "        for holding in holdings:\n            holding.release()\n        wanted",
        "        wanted",
        TRANSACTION + "18_evictions_during_a_claim",
    ),
    Bug(
        "share between tenants",
        "paired_cache.py",
        "spec.block_size, lora, tenant_salt, contents)",
        'spec.block_size, lora, b"", contents)',
        REUSE + "27_other_spans_models_adapters_and_salts_share_nothing_in_the_draft",
    ),
    Bug(
        "commit the drafts that were rejected",
        "admission.py",
        "reached = row.start + row.num_known + max(0, len(new_tokens) - 1)",
        "reached = min(row.target_end, request.num_known)",
        TRANSACTION + "19_in_tiny_pools_every_request_ends_or_is_refused",
    ),
    Bug(
        "draft deeper than tokens may still come",
        "step_builder.py",
        "drafts.within(room - 1).first(",
        "drafts.first(",
        ADMISSION + "trees_are_cut_by_number_to_the_budget_and_by_depth_to_what_can_be_used",
    ),
    Bug(
        "cut a draft of a tree, but not what follows it",
        "drafts.py",
        "if kept[node] and parent in places:",
        "if kept[node]:",
        DRAFTS + "what_follows_a_node_that_is_cut_goes_with_it",
    ),
    Bug(
        "reserve draft slots as if no draft were accepted",
        "batch_plan.py",
        "new = self.drafts.depth + 1 if self.needs_logits else 0",
        "new = 1 if self.needs_logits else 0",
        ADMISSION_LIVES,
    ),
    Bug(
        "preempt the first in rank",
        "step_builder.py",
        "victim = self._holders[-1] if self._holders else None",
        "victim = self._holders[0] if self._holders else None",
        ADMISSION + "the_last_in_rank_is_preempted_and_gets_its_own_tokens_all_the_same",
    ),
    Bug(
        "evict for a reservation that can't be granted",
        "block_pool.py",
        "            if count > self.available:\n                return None\n",
        "            self.tree.evict(count - len(free))\n"
        "            if count > len(free):\n                return None\n",
        TREE + "a_request_for_too_many_blocks_evicts_nothing",
    ),
    Bug(
        "report a raw block as gone while another successor of it is held",
        "ledger.py",
        "        self.held.update(repeated)\n",
        "",
        REPORTS + "a_raw_block_stays_reported_while_any_successor_of_it_is_held",
    ),
    Bug(
        "let go of a block that the window still sees",
        "block_pool.py",
        "max(0, position - self.window + 1) // self.block_size",
        "max(0, position - self.window + self.block_size) // self.block_size",
        RANDOM_LIVES,
    ),
    Bug(
        "go on where the window sees blocks that are gone",
        "runs.py",
        "        elif min(match.depth(size), most) - window + 1 >= first * size:\n",
        "        elif min(match.depth(size), most) >= first * size:\n",
        WINDOWS + "a_claim_needs_the_blocks_that_the_window_sees_and_no_others",
    ),
    Bug(
        "take a block that is gone for one that is published",
        "prefix_tree.py",
        "            if leaf.gone:\n",
        "            if leaf.gone and not leaf.children:\n",
        WINDOWS + "a_gap_in_the_middle_is_filled_by_whoever_computes_it_again",
    ),
    Bug(
        "keep all that lies behind the window until the request ends",
        "holding.py",
        "            self.pool.tree.leave(self.leaf, self.first, min(seen, self.published))\n",
        "            pass\n",
        WINDOWS + "a_request_keeps_two_windows_at_most",
    ),
    Bug(
        "never forget a run without blocks",
        "prefix_tree.py",
        "            if run.gone and not run.users and not run.children:\n                self._cut(run, 0)\n",
        "",
        RANDOM_LIVES,
    ),
)
