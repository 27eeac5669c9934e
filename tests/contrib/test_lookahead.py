"""`lookahead`: the parameters come back to the slow weights, and only then."""

import torch

import muonfx as mfx

PARAMS = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}


def test_slow_weights_move_at_every_meeting_and_are_the_parameters_there():
    tx = mfx.contrib.lookahead(mfx.scale(-0.5), sync_period=3, slow_step_size=0.25)
    state, params, slow = tx.init(PARAMS), PARAMS, PARAMS["w"]
    fast = slow
    for step in range(1, 10):
        updates, state = tx.update(params, state, params)
        params = mfx.apply_updates(params, updates)
        fast = 0.5 * fast
        if step % 3 == 0:
            fast = slow = slow + 0.25 * (fast - slow)
        torch.testing.assert_close(params["w"], fast)
        torch.testing.assert_close(state.slow["w"], slow)


def test_parameters_that_are_lost_between_meetings_are_no_news_to_the_slow_weights():
    tx = mfx.contrib.lookahead(mfx.identity(), 2, 0.5)
    _, state = tx.update({"w": torch.full((2,), float("nan"), dtype=torch.float64)}, tx.init(PARAMS), PARAMS)
    assert torch.equal(state.slow["w"], PARAMS["w"])
