"""A convolutional network whose batch normalisations are computed again on every call.

Slow: torch.compile may not hold weights constant, so each normalisation is arithmetic of its own after its convolution.
Look at: `freeze_weights`, which fxopt.optimize may use because it owns the model. Weights become constants, and
Inductor folds each normalisation into the weights of its convolution.
On a GPU: add `split_precision_conv` to passes, which computes fp32 convolutions on tensor cores, at fp32's accuracy.
Try: the last lines. A change of the statistics is seen, and the weights are folded anew.
"""

from itertools import pairwise

import torch
from finding import DEVICE, TIME_LIMIT, show

import fxopt

CHANNELS = (3, 32, 64, 64)

torch.manual_seed(0)
layers = []
for before, after in pairwise(CHANNELS):
    layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers).eval().to(DEVICE)
images = torch.randn(8, 3, 64, 64, device=DEVICE)

fast = fxopt.optimize(model, (images,), time_limit=TIME_LIMIT, passes=["freeze_weights"])
show(fast.report, "freeze_weights")

# with torch.no_grad():
#     model[1].running_mean.add_(1)
# torch.testing.assert_close(fast(images), model(images), rtol=1e-4, atol=1e-4)
