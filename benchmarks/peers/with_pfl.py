"""pfl 0.6.0: federated averaging in its simulation."""

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from protocol import BATCH, ETA, serve, threads, work

torch.set_num_threads(threads())
x, y, layers = work()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        parts = []
        for i, (w, _) in enumerate(layers):
            parts += [torch.nn.Linear(*w.shape)] + ([torch.nn.ReLU()] if i < len(layers) - 1 else [])
        self.net = torch.nn.Sequential(*parts)

    def load(self):
        with torch.no_grad():
            for layer, (w, b) in zip((part for part in self.net if isinstance(part, torch.nn.Linear)), layers):
                layer.weight.copy_(torch.from_numpy(w.T))
                layer.bias.copy_(torch.from_numpy(b))

    def forward(self, x):
        return self.net(x)

    def loss(self, x, y, eval=False):
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y, eval=False):
        return {"loss": Weighted(0.0, 1)}


net = Net()
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
users = {i: Dataset((torch.from_numpy(x[i]), torch.from_numpy(y[i])), user_id=str(i)) for i in range(len(x))}
data = FederatedDataset(lambda i: users[i], get_user_sampler("minimize_reuse", list(users)))
train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=ETA, local_batch_size=BATCH)
backend = SimulatedBackend(training_data=data, val_data=data)


def round_():
    net.load()
    algorithm = FederatedAveraging()
    params = NNAlgorithmParams(1, 10**9, len(x), None)
    algorithm.run(params, backend, model, train, NNEvalHyperParams(10**6), [], send_metrics_to_platform=False)
    return [(part.weight.detach().numpy().T, part.bias.detach().numpy()) for part in net.net if hasattr(part, "weight")]


serve(round_)
