import copy
import json

import numpy as np
import pytest

from mooring.core.errors import RequestError
from mooring.shapes.trees import Trees
from tests.support.trees import draw_trees

RNG = np.random.default_rng(0)


def walk(trees, row):
    """The scores of one row, node by node."""
    scores = trees.base.copy()
    for t in range(len(trees)):
        node = 0
        while node < trees.feature.shape[1]:
            node = 2 * node + 1 + bool(np.float32(row[trees.feature[t, node]]) >= trees.threshold[t, node])
        scores[trees.output[t]] += trees.leaf[t, node - trees.feature.shape[1]]
    return scores


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_scores_are_those_of_a_walk_down_each_tree(depth):
    trees, x = draw_trees(depth=depth), RNG.standard_normal((30, 4))
    assert (trees.score(x) == np.array([walk(trees, row) for row in x])).all()
    assert (trees.score(x)[:1] == trees.score(x[:1])).all()


def test_no_trees_and_no_rows():
    empty = Trees.from_json(json.loads(json.dumps(draw_trees(count=0).as_json())))
    assert (empty.score(np.ones((3, 4))) == empty.base).all()
    assert draw_trees().score(np.zeros((0, 4))).shape == (0, 2)


def damage(**changes):
    return lambda content: content.update(changes)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("leaf"),
        lambda content: content["leaf"].pop(),
        lambda content: content["leaf"][0].pop(),
        lambda content: content["feature"][0].__setitem__(0, 4),
        lambda content: content["feature"][0].__setitem__(0, -1),
        lambda content: content["threshold"][0].__setitem__(0, float("nan")),
        lambda content: content["threshold"][0].__setitem__(0, "a"),
        lambda content: content["leaf"][0].__setitem__(0, float("inf")),
        lambda content: content["leaf"][0].__setitem__(0, None),
        damage(base=[]),
        damage(base="x"),
        damage(features=0),
        damage(features=True),
        damage(output=[2] * 9),
        damage(output=[0.5] * 9),
        damage(gain=[1.0]),
        damage(threshold=3),
    ],
)
def test_damaged_trees_are_refused_in_one_sentence(change):
    content = copy.deepcopy(draw_trees().as_json())
    change(content)
    with pytest.raises(RequestError, match=r"m\.json: not trees that Mooring wrote") as error:
        Trees.from_json(content, "m.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [None, [], "text", 3])
def test_other_content_is_refused(content):
    with pytest.raises(RequestError, match="an object was expected"):
        Trees.from_json(content)
