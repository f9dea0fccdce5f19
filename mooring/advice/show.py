"""An advice in the terminal."""

from __future__ import annotations

from math import floor, isfinite, log10
from typing import Any

from mooring.advice.advise import Advice
from mooring.advice.families import ALONE, COMMON, DIAGONAL, LAMBDA, MIXTURE, SIZE, TUNED

MOST_ROWS = 20
LOSSES = ("alone", "common", "personal", "gain", "gain_low", "gain_high")
COLUMNS = {
    "client": "client",
    "rows": "rows",
    "alone": "alone",
    "common": "common",
    "personal": "advised",
    "gain": "gain",
    "gain_low": "low",
    "gain_high": "high",
    "plan": "plan",
    "lambda": "lam",
    "verdict": "verdict",
}

PLANS = {
    COMMON: "one model for all",
    ALONE: "everyone's own model, with a ridge",
    LAMBDA: "one stiffness for all",
    SIZE: "a stiffness by the client's rows, the fewer the tauter",
    DIAGONAL: "a stiffness by the client's rows and the coefficient (lam: their geometric mean)",
    MIXTURE: "own and common model mixed, a being the own one's share",
    TUNED: "the common model after local steps",
}


def show_advice(display: Any, advice: Advice) -> None:
    """The summary, the clients by gain, and why."""
    told = advice.summary
    rows = [
        {"who": "alone: every client by itself", "loss": told["alone"]},
        {"who": "common: one model for all", "loss": told["common"]},
        {"who": "one lambda for all", "loss": told["shared_lambda"]},
        {"who": "advised", "loss": told["advised"]},
    ]
    title = f"{advice.job.clients.title}: test {told['metric']} over {len(advice.clients)} clients"
    display.table(title, rows, {"who": "model", "loss": told["metric"]})
    order = advice.clients.sort_values("gain", ascending=False)
    caption = "gain: loss saved over training alone, with its 95 % interval; every client has the model of its plan"
    if len(order) > MOST_ROWS:
        half = MOST_ROWS // 2
        order = order.iloc[[*range(half), *range(len(order) - half, len(order))]]
        caption = f"The {half} that gain most and least of {len(advice.clients)}. {caption}"
    records = order.to_dict("records")
    places = decimals(float(order["alone"].median()))
    for row in records:
        row |= {key: f"{row[key]:.{places}f}" for key in LOSSES if row[key] == row[key]}
        told = {"": row["lambda"], "a ": row["alpha"]}  # one of them, or none after local steps
        row["lambda"] = next((f"{mark}{value:.2g}" for mark, value in told.items() if value == value), "")
    plans = advice.clients["plan"].unique()
    columns = {k: v for k, v in COLUMNS.items() if k != "plan" or len(plans) > 1}
    display.table("Clients", records, columns, caption)
    if len(plans) == 1:
        display.say(f"The plan of all clients: {plans[0]}, {PLANS[plans[0]]}.")
    for sentence in advice.words:
        display.say(sentence)
    if advice.run is not None:
        display.say(f"Run: {advice.run} (figures: path.png, gains.png)")


def decimals(typical: float) -> int:
    """Places after the point that show a number of this size with three digits, and those of its column alike."""
    return min(max(2 - floor(log10(abs(typical))), 0), 6) if typical and isfinite(typical) else 3
