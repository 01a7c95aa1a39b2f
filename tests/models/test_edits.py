import pytest
import torch
from torch import nn

from fitting import hooks
from i2cl.models.edits import edit_inputs, edit_outputs

X = torch.arange(6.0).view(1, 3, 2)


class Pair(nn.Module):
    """Returns a tuple, as attention does."""

    def forward(self, hidden_states, factor=2.0):
        return hidden_states * factor, "weights"


def test_edits_are_applied_in_order_and_affect_later_modules():
    module = Pair()
    with edit_outputs([(module, lambda value: value + 1)]):
        first, second = module(X)
    assert torch.equal(first, 2 * X + 1)
    assert second == "weights"
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, second)
    with edit_outputs([(first, lambda value: 3 * value)]):
        edited = model(X)
    assert torch.equal(edited, second(3 * first(X)))
    assert not torch.equal(edited, model(X))
    module = nn.Identity()
    with edit_outputs([(module, lambda value: value + 1), (module, lambda value: value * 10)]):
        assert torch.equal(module(X), (X + 1) * 10)


def test_none_keeps_the_value():
    seen = []
    for edit in (edit_inputs, edit_outputs):
        for module in (nn.Identity(), Pair()):
            with edit([(module, seen.append)]):
                output = module(hidden_states=X) if isinstance(module, Pair) else module(X)
            if isinstance(module, Pair):
                assert output[1] == "weights"
                output = output[0] / 2
            assert torch.equal(output, X)
    assert [value.sum().item() / X.sum().item() for value in seen] == [1, 1, 1, 2]


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_first_argument_is_replaced(keyword):
    module = Pair()
    with edit_inputs([(module, lambda value: value + 1)]):
        output = module(hidden_states=X, factor=5.0) if keyword else module(X, 5.0)
    assert torch.equal(output[0], 5 * (X + 1))


@pytest.mark.parametrize("edit", [edit_inputs, edit_outputs])
def test_hooks_are_removed_after_success_and_failure(edit):
    model, calls = nn.Sequential(nn.Identity(), nn.Identity()), []
    handle = model[0].register_forward_hook(lambda *_: calls.append("kept"))
    with edit([(part, lambda value: value + 1) for part in model]):
        assert hooks(model) == 2 + 1
        assert torch.equal(model(X), X + 2)
    assert torch.equal(model(X), X)
    assert calls == ["kept", "kept"]
    handle.remove()
    assert hooks(model) == 0
    module = nn.Identity()

    def changes():
        yield module, lambda value: value
        assert hooks(module) == 1
        raise LookupError("no such module")

    with pytest.raises(LookupError), edit(changes()):
        pass
    assert hooks(module) == 0
