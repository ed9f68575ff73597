"""Speculative decoding. A `SpeculativeExecutor` (executor.py) wraps the target executor, and each of its steps goes
through these stages (drafted_steps.py):

1. Propose: the PENDING tokens of the batch are filled in, and a `Proposer` (proposer.py) returns draft tokens for its
   rows. `LookupProposer` takes them from earlier tokens (`ngram`, `suffix`), `DraftModelProposer` from a small model
   (`draft`) and `MtpProposer` from a layer that reads hidden states of the target model (`mtp`, `eagle3`).
2. Verify: the target executor computes the rows with their drafts in one step and samples a token behind each draft.
3. Accept: `Slots.accept` keeps the drafts of a row up to the first that differs from the sampled token, and that token.
   So drafts never change an answer.
4. Learn: the `DraftPolicy` (policy.py) measures steps and acceptance, and decides how many drafts are verified next.
   Where drafts do not pay, it pauses drafting, and steps run as without speculation (plain_steps.py).

On a device that runs ahead, stages overlap: the step that verifies drafts is launched before the draft model has made
them, and the next run of the draft model before the tokens are known that it reads (verified_rows.py).

The device side is a `DraftModel` or an `MtpLayer` (draft_model.py), with a KV cache (draft_cache.py) and sampling
parameters (draft_slots.py) of its own.
"""
