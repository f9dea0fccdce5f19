"""Figure 4 of `effect`: accuracy of the clients' own models on their own classes, and losses by rounds."""

from mooring.experiments.base.claims import Claim, every, falling, higher, ordered
from mooring.experiments.base.experiment import Experiment, Panel
from mooring.experiments.effect._images import trial
from mooring.experiments.effect._points import NAMES, SOFTMAX, labels, line
from mooring.experiments.effect._rounds import at_round
from mooring.experiments.effect.fig1_softmax import EXPERIMENT as FIG1

EARLY = 2
FEW, ALL = 2, 10
ACCURACY = line("P1", SOFTMAX)
LAST = {c: line("P1", SOFTMAX, classes=c) for c in (FEW, ALL)}


def early(series: str, lam: float):
    return at_round(series, EARLY, method="FedProx", lam=lam)


EXPERIMENT = Experiment(
    title="Accuracy of the clients' own models on their own classes, and losses by rounds (softmax regression)",
    trial=trial,
    presets=FIG1.presets,
    claims=[
        Claim(
            "a-fewer-classes-easier",
            "the accuracy of all methods improves as the number of classes falls (P1)",
            every(**{name: falling(ref, "classes") for name, ref in ACCURACY.items()}),
            note="LocalTrain and FedProx improve at every lambda; GlobalTrain does not. Under P1 a client is tested on "
            "its own classes, but the common model still chooses among all ten: its task does not become simpler, and "
            "training on two classes per client makes it slightly worse.",
        ),
        Claim(
            "a-global-and-large-lambda-at-low-heterogeneity",
            "GlobalTrain and FedProx with larger lambda perform better at low heterogeneity (10 classes): GlobalTrain "
            "best, accuracy rising with lambda from LocalTrain's",
            ordered([LAST[ALL][name] for name in ("LocalTrain", *NAMES, "GlobalTrain")]),
            note="On MNIST (.861, then .904, .907, .906, and .915) and on the stand-in: GlobalTrain is best and "
            "LocalTrain worst, but with 10 classes the three lambda differ by less than a point. There a lambda of 0.5 "
            "already ties the models together, and larger ones only converge more slowly (after 200 instead of 40 "
            "rounds accuracies are .96 for lambda = 0.5 and for 2.5, 2 draws).",
        ),
        Claim(
            "a-local-and-small-lambda-at-high-heterogeneity",
            "LocalTrain and FedProx with smaller lambda perform better as heterogeneity increases: at 2 classes both "
            "are above GlobalTrain, and the smallest lambda above the largest",
            every(
                localtrain=higher(LAST[FEW]["LocalTrain"], LAST[FEW]["GlobalTrain"]),
                small=higher(LAST[FEW]["small"], LAST[FEW]["GlobalTrain"]),
                smallest=higher(LAST[FEW]["small"], LAST[FEW]["large"]),
            ),
            note="On MNIST both are 9 points above GlobalTrain, beyond the interval; the smallest lambda's lead over "
            "the largest, .981 against .976, is within that of three repeats.",
        ),
        Claim(
            "b-small-lambda-faster-early",
            "smaller lambda converges faster at the early stages: training loss (caption) and test loss (text) after "
            "2 rounds rise with lambda, at every number of classes",
            every(**{what: ordered([early(what, lam) for lam in SOFTMAX]) for what in ("loss", "test loss")}),
        ),
    ],
    panels=[
        Panel(
            "classes", labels(line(series, SOFTMAX), SOFTMAX), "classes per client", f"test accuracy, {series}", "(a)"
        )
        for series in ("P1", "P2")
    ]
    + [
        Panel(
            "t",
            labels(line(series, SOFTMAX, classes=c), SOFTMAX),
            "communication rounds",
            what,
            f"(b) {c} classes",
            log="y",
        )
        for series, what in (("loss", "training loss"), ("test loss", "test loss, P1"))
        for c in (FEW, ALL)
    ],
    reads="The runs of effect-fig1-softmax. Only a test on the client's own classes (P1) can make accuracy rise when "
    "classes fall; P2 is drawn beside it. The text of (b) speaks of testing loss, its caption of training loss: both "
    "are tested.",
)
