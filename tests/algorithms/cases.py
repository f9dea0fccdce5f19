"""The settings under which every algorithm is held to its contract: one row (or more) per algorithm.

Each row is (name, fields, problems it runs on). `tests/algorithms/test_contract.py` fails if an algorithm has no row.
"""

CASES = [
    ("local", {}, ("linear", "logistic")),
    ("local", {"inner": "sgd", "batch": 4}, ("linear", "softmax")),
    ("global", {}, ("linear", "logistic")),
    ("global", {"inner": "sgd", "batch": 8}, ("linear",)),
    ("fedavg", {}, ("linear", "logistic")),
    ("fedavg", {"batch": 4, "epochs": 2, "decay": 0.1, "aggregation": "elastic"}, ("linear", "softmax")),
    ("fedprox_shared", {}, ("linear", "logistic")),
    ("fedprox_shared", {"lam": 0.3, "inner": "sgd", "batch": 4}, ("softmax",)),
    ("fedprox_one_stage", {}, ("linear", "logistic")),
    ("fedprox_one_stage", {"lam": 0.3, "inner": "sgd", "batch": 4, "warm": False}, ("linear", "softmax")),
    (
        "fedprox_one_stage",
        {"lam": {"per_client": [0.1, 0.2, 0.3, 0.4, 0.5], "per_coefficient": [1, 2, 3, 4]}},
        ("linear",),
    ),
]
