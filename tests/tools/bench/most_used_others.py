"""Experts, recommenders, graphs, policies, losses, and optimizers that solve systems."""

import torch
from torch import nn

from tests.tools.bench.most_used_training import WIDTH, steps


class Experts(nn.Module):
    """A mixture of experts: routed by topk, gathered by index, put back by index_add and scatter."""

    def __init__(self, many=4):
        super().__init__()
        self.route, self.many = nn.Linear(WIDTH, many), many
        self.up, self.down = (nn.Parameter(torch.randn(many, *s) / 8) for s in ((WIDTH, 48), (48, WIDTH)))

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        chances = self.route(flat).softmax(-1)
        weights, chosen = chances.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(self.many):
            rows, spots = torch.where(chosen == expert)
            y = nn.functional.silu(flat[rows] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, rows, y * weights[rows, spots, None])
        used = torch.zeros(self.many).scatter_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
        balance = (used / used.sum() * chances.mean(0)).sum() * self.many
        return out.view_as(x), balance


def mixture_of_experts():
    model, x = Experts(), torch.randn(2, 6, WIDTH)

    def loss(model):
        y, balance = model(x)
        return nn.functional.mse_loss(y, x) + 0.01 * balance

    steps(model, loss, torch.optim.AdamW(model.parameters()))


def mixture_by_sorting():
    """The same by sorting the rows by expert, with one batched product."""
    model, x = Experts(), torch.randn(12, WIDTH)

    def loss(model):
        weights, chosen = model.route(x).sigmoid().topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=model.many)
        ends = counts.cumsum(0)
        slot = torch.arange(order.numel()) - (ends - counts)[chosen.flatten()[order]]
        padded = torch.zeros(model.many, 24, WIDTH).index_put((chosen.flatten()[order], slot), x[order // 2])
        y = torch.bmm(nn.functional.gelu(torch.bmm(padded, model.up)), model.down)
        back = y[chosen.flatten()[order], slot] * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, back).square().mean() + torch.logsumexp(weights, -1).mean()

    steps(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))


def recommender():
    """Bags of embeddings, feature crosses, a loss on logits, row-wise Adagrad."""
    bags, dense, top = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(6, 8), nn.Linear(8 + 3, 1)
    users = nn.Embedding(50, 8)
    whole = nn.ModuleList([bags, dense, top, users])

    def loss(_):
        x = torch.stack(
            [
                bags(torch.randint(0, 50, (4, 3))),
                nn.functional.relu(dense(torch.randn(4, 6))),
                users(torch.randint(0, 50, (4,))),
            ],
            1,
        )
        cross = torch.bmm(x, x.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1)
        y = top(torch.cat([x[:, 0], cross[:, rows, columns]], dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(
            y, torch.randint(0, 2, (4,)).float(), pos_weight=torch.tensor(2.0)
        )

    steps(whole, loss, torch.optim.Adagrad(whole.parameters(), foreach=True))


def contrastive():
    """Two towers, normalised, all pairs, a learned temperature; and a triplet loss."""
    one, two, scale = nn.Linear(12, 8), nn.Linear(10, 8), nn.Parameter(torch.tensor(2.0))
    whole = nn.ModuleList([one, two])

    def loss(_):
        a, b = (
            nn.functional.normalize(one(torch.randn(6, 12)), dim=-1),
            nn.functional.normalize(two(torch.randn(6, 10)), dim=-1),
        )
        logits = scale.exp().clamp(max=100) * a @ b.t()
        here = torch.arange(6)
        far = nn.functional.triplet_margin_loss(a, b, b.roll(1, 0)) + nn.functional.cosine_embedding_loss(
            a, b, torch.ones(6)
        )
        return (
            (nn.functional.cross_entropy(logits, here) + nn.functional.cross_entropy(logits.t(), here)) / 2
            + far
            + torch.cdist(a, b).mean()
        )

    steps(whole, loss, torch.optim.Adamax(whole.parameters()))


def losses():
    x, y = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    total = (
        nn.functional.l1_loss(x, y)
        + nn.functional.huber_loss(x, y)
        + nn.functional.kl_div(nn.functional.log_softmax(x, -1), y.softmax(-1), reduction="batchmean")
    )
    total = (
        total
        + nn.functional.gaussian_nll_loss(x, y, torch.ones(6, 5))
        + nn.functional.poisson_nll_loss(x, y.abs())
        + nn.functional.soft_margin_loss(x, y.sign())
    )
    total = (
        total
        + nn.functional.multi_margin_loss(x, torch.arange(6) % 5)
        + nn.functional.margin_ranking_loss(x[:, 0], y[:, 0], y[:, 1].sign())
    )
    total = (
        total
        + nn.functional.hinge_embedding_loss(x, y.sign())
        + nn.functional.multilabel_soft_margin_loss(x, (y > 0).float())
    )
    chance = x.sigmoid()
    focal = -((1 - chance) ** 2 * chance.clamp(1e-6).log() * (y > 0)).mean()
    dice = 1 - 2 * (chance * (y > 0)).sum() / (chance.sum() + (y > 0).sum())
    spread = nn.functional.ctc_loss(
        torch.randn(7, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 1]]), (7, 7), (2, 2)
    )
    (total + focal + dice + spread).backward()


def graph_network():
    """Messages along edges: index_select, scatter_add, a softmax by segment, batch norm."""
    lin, att, norm = nn.Linear(8, 8), nn.Linear(16, 1), nn.BatchNorm1d(8)
    whole = nn.ModuleList([lin, att, norm])

    def loss(_):
        x, edges = torch.randn(6, 8), torch.randint(0, 6, (2, 12))
        h = lin(x)
        both = torch.cat([h.index_select(0, edges[0]), h.index_select(0, edges[1])], 1)
        score = nn.functional.leaky_relu(att(both).squeeze(-1))
        top = torch.full((6,), -1e9).scatter_reduce(0, edges[1], score, "amax")
        w = (score - top[edges[1]]).exp()
        w = w / torch.zeros(6).scatter_add(0, edges[1], w)[edges[1]].add(1e-9)
        out = torch.zeros_like(h).index_add(0, edges[1], w[:, None] * h[edges[0]])
        return norm(nn.functional.elu(out)).pow(2).sum(-1).sqrt().mean()

    steps(whole, loss, torch.optim.RAdam(whole.parameters()))


def policy_gradient():
    """Advantages, clipped ratios, entropy, a value head, a normal policy."""
    actor, critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), nn.Linear(6, 1)
    whole = nn.ModuleList([actor, critic])

    def loss(_):
        x = torch.randn(10, 6)
        rewards, done = torch.randn(10), torch.rand(10) < 0.1
        policy = torch.distributions.Categorical(logits=actor(x))
        action = policy.sample()
        value, running, gains = critic(x).squeeze(-1), torch.zeros(()), []
        for i in reversed(range(10)):
            running = rewards[i] + 0.99 * running * (~done[i]).float()
            gains.insert(0, running)
        gains = torch.stack(gains)
        lead = (gains - value).detach()
        lead = (lead - lead.mean()) / (lead.std() + 1e-8)
        ratio = (policy.log_prob(action) - policy.log_prob(action).detach()).exp()
        surrogate = torch.minimum(ratio * lead, ratio.clamp(0.8, 1.2) * lead)
        noise = torch.distributions.Normal(value, torch.ones(10)).rsample()
        return (
            -surrogate.mean()
            + nn.functional.mse_loss(value, gains)
            - 0.01 * policy.entropy().mean()
            + 0.0 * noise.sum()
        )

    steps(whole, loss, torch.optim.Adam(whole.parameters(), fused=True))


def second_order():
    """Muon's orthogonal steps, Shampoo's roots of covariances, LBFGS."""
    x, y = torch.randn(12, 4), torch.randn(12, 3)
    w = nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.LBFGS([w], max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (x @ w - y).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        u = w.grad / (w.grad.norm() + 1e-7)
        for _ in range(3):
            a = u @ u.mT
            u = 3.4445 * u + (-4.7750 * a + 2.0315 * a @ a) @ u
        values, vectors = torch.linalg.eigh(x.t() @ x + 1e-3 * torch.eye(4))
        root = vectors @ values.clamp_min(0).pow(-0.25).diag() @ vectors.mT
        solved = torch.linalg.solve(x.t() @ x, x.t() @ y)
        factor = torch.linalg.cholesky(x.t() @ x + torch.eye(4))
        inverse, q = torch.linalg.inv(factor), torch.linalg.qr(x).Q
        return (
            u,
            root,
            solved,
            torch.linalg.solve_triangular(factor, y[:4], upper=False),
            inverse,
            q,
            torch.linalg.svdvals(x),
        )
