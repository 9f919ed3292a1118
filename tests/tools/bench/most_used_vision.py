"""Images and sound: convolutions, pooling, resizing, diffusion, detection."""

import math

import torch
from torch import nn

from tests.tools.bench.most_used_training import HEADS, WIDTH, steps


class Residual(nn.Module):
    def __init__(self, ins, outs, stride=1):
        super().__init__()
        self.one, self.two = nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.a, self.b, self.side = nn.BatchNorm2d(outs), nn.BatchNorm2d(outs), nn.Conv2d(ins, outs, 1, stride)

    def forward(self, x):
        y = nn.functional.relu(self.a(self.one(x)), inplace=True)
        return nn.functional.relu(self.b(self.two(y)) + self.side(x))


def resnet():
    model = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
                          Residual(8, 8), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))  # fmt: skip

    def loss(model):
        return nn.functional.cross_entropy(
            model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)), label_smoothing=0.1
        )

    steps(model, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4))
    model.eval()
    with torch.no_grad():
        return model(torch.randn(4, 3, 32, 32)).topk(5).indices


def mobile_net():
    """Depthwise convolutions, squeeze and excitation, hard activations, RMSprop."""

    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep, self.norm = nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8)
            self.less, self.more = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)

        def forward(self, x):
            y = nn.functional.hardswish(self.norm(self.deep(x)))
            s = nn.functional.hardsigmoid(
                self.more(nn.functional.relu6(self.less(nn.functional.adaptive_avg_pool2d(y, 1))))
            )
            return x + y * s

    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Squeezed(), Squeezed(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 64, 10))  # fmt: skip

    def loss(model):
        return nn.functional.nll_loss(
            nn.functional.log_softmax(model(torch.randn(2, 3, 32, 32)), 1), torch.randint(0, 10, (2,))
        )

    steps(model, loss, torch.optim.RMSprop(model.parameters(), momentum=0.9, centered=True))


def diffusion():
    """A block of a UNet: group norm, time embedding, attention, upsampling, a skip; then a sampling step."""

    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.down, self.mid = (
                nn.Conv2d(4, 16, 3, 1, 1),
                nn.Conv2d(16, 16, 3, 2, 1),
                nn.Conv2d(16, 16, 3, 1, 1),
            )
            self.norms = nn.ModuleList(nn.GroupNorm(4, n) for n in (16, 16, 32))
            self.time, self.qkv = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)), nn.Conv2d(16, 48, 1)
            self.out = nn.Conv2d(32, 4, 3, 1, 1)

        def forward(self, x, t):
            freqs = torch.exp(-math.log(10000) * torch.arange(8) / 8)
            angle = t[:, None].float() * freqs[None]
            time = self.time(torch.cat([angle.sin(), angle.cos()], dim=-1))
            skip = self.into(x)
            y = self.down(nn.functional.silu(self.norms[0](skip)))
            y = self.mid(nn.functional.silu(self.norms[1](y))) + time[:, :, None, None]
            b, c, h, w = y.shape
            q, k, v = self.qkv(y).flatten(2).chunk(3, dim=1)
            scores = torch.einsum("bci,bcj->bij", q, k) * c**-0.5
            y = y + torch.einsum("bij,bcj->bci", scores.softmax(-1), v).reshape(b, c, h, w)
            y = torch.cat([nn.functional.interpolate(y, scale_factor=2, mode="nearest"), skip], dim=1)
            return self.out(nn.functional.silu(self.norms[2](y)))

    model, betas = Unet(), torch.linspace(1e-4, 0.02, 10)
    alphas = (1 - betas).cumprod(0)

    def loss(model):
        x, t = torch.randn(2, 4, 8, 8), torch.randint(0, 10, (2,))
        noise, a = torch.randn_like(x), alphas[t].view(-1, 1, 1, 1)
        return nn.functional.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    steps(model, loss, torch.optim.AdamW(model.parameters(), amsgrad=True))
    average = [p.detach().clone() for p in model.parameters()]
    torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
    with torch.no_grad():
        x = torch.randn(1, 4, 8, 8)
        guess = model(x, torch.tensor([9]))
        return ((x - (1 - alphas[9]).sqrt() * guess) / alphas[9].sqrt()).clamp(-1, 1)


def autoencoder():
    """Transposed convolutions, bilinear upsampling, padding, the reparametrised normal, a KL term."""

    class Vae(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Sequential(
                nn.ReflectionPad2d(1), nn.Conv2d(1, 8, 3, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(8 * 64, 8)
            )
            self.wide, self.grow = nn.Linear(4, 8 * 16), nn.ConvTranspose2d(8, 4, 4, 2, 1)
            self.last = nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, x):
            mean, log = self.encode(x).chunk(2, dim=1)
            z = mean + torch.randn_like(mean) * (0.5 * log).exp()
            y = nn.functional.elu(self.grow(self.wide(z).view(-1, 8, 4, 4)))
            y = nn.functional.interpolate(y, size=(16, 16), mode="bilinear", align_corners=False)
            return torch.sigmoid(self.last(y)), mean, log

    model = Vae()

    def loss(model):
        x = torch.rand(4, 1, 16, 16)
        y, mean, log = model(x)
        return nn.functional.binary_cross_entropy(y, x, reduction="sum") - 0.5 * torch.sum(
            1 + log - mean.pow(2) - log.exp()
        )

    steps(model, loss, torch.optim.Adam(model.parameters(), foreach=True, maximize=False))


def vision_transformer():
    model = nn.Sequential(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, activation="gelu", norm_first=True)
    )
    patches, token, head = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Linear(WIDTH, 10)
    whole = nn.ModuleList([model, patches, head])

    def loss(_):
        x = patches(torch.randn(2, 3, 16, 16)).flatten(2).transpose(1, 2)
        x = model(torch.cat([token.expand(2, -1, -1), x], dim=1))
        mixed = 0.7 * nn.functional.one_hot(torch.tensor([1, 2]), 10) + 0.3 * nn.functional.one_hot(
            torch.tensor([3, 4]), 10
        )
        return -(mixed * nn.functional.log_softmax(head(x[:, 0]), dim=-1)).sum(-1).mean()

    steps(whole, loss, torch.optim.AdamW(whole.parameters(), foreach=True))


def detection():
    """Boxes: overlaps, suppression by score, sampling at points."""
    with torch.no_grad():
        corner, size = torch.rand(8, 2), torch.rand(8, 2)
        boxes, scores = torch.cat([corner, corner + size], 1), torch.rand(8)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        low, high = torch.max(boxes[:, None, :2], boxes[None, :, :2]), torch.min(boxes[:, None, 2:], boxes[None, :, 2:])
        inter = (high - low).clamp(min=0).prod(-1)
        overlap = inter / (area[:, None] + area - inter)
        order = scores.argsort(descending=True)
        beaten = (overlap[order][:, order].triu(1) > 0.5).any(0)
        kept = order[~beaten]
        best, which = overlap.max(1)
        matched = torch.where(best > 0.3, which, -1)
    image = torch.randn(1, 3, 8, 8, requires_grad=True)
    grid = nn.functional.affine_grid(
        torch.tensor([[[1.0, 0.1, 0.0], [0.0, 1.0, 0.2]]]), [1, 3, 4, 4], align_corners=False
    )
    nn.functional.grid_sample(image, grid, align_corners=False).amax(dim=(2, 3)).sum().backward()
    return kept, matched, torch.unique(matched), boxes.floor().long(), torch.isfinite(boxes).all()


def speech():
    """Frames, a spectrum, log mel, one-dimensional convolutions, layer norm over channels."""
    with torch.no_grad():
        wave = torch.randn(2, 256)
        power = torch.stft(wave, 32, window=torch.hann_window(32), return_complex=True).abs().pow(2)
        mel = (torch.rand(8, 17) @ power).clamp(min=1e-10).log10()
        mel = torch.maximum(mel, mel.amax() - 8.0)
        mel = (mel - mel.mean(dim=(1, 2), keepdim=True)) / mel.std(dim=(1, 2), keepdim=True)
    model = nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 16, 3, 2, 1), nn.GLU(1), nn.PReLU())

    def loss(model):
        return nn.functional.layer_norm(model(mel).permute(0, 2, 1), (8,)).max(dim=1).values.mean()

    steps(model, loss, torch.optim.ASGD(model.parameters()))
