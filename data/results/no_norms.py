"""Models without norms, and the recipes that were tried. This is a file for --with."""
import torch.nn as nn

import recipes

class NoNorm(nn.RMSNorm):
    """Stands for a norm: times a constant, which nothing divides out again. With 7 a
    model of 2 blocks trains as well as with norms."""

    def forward(self, x):
        return 7 * self.weight * x

nn.RMSNorm = NoNorm
