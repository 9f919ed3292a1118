"""How the programs of `most_used_programs` train."""

import torch

WIDTH, HEADS = 32, 4


def step(model, loss, optimizer):
    optimizer.zero_grad()
    loss(model).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def steps(model, loss, optimizer, many=2):
    for _ in range(many):
        step(model, loss, optimizer)
