"""Statements with the number of the rank, in lockstep: each gives what plain Python gives on each rank, or is refused; nothing in silence."""

import importlib.util
import itertools
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import localtensor as lt
from localtensor.lockstep.values.rank_int import on_rank
from tests.localtensor.lockstep import more_statements

RANKS, AT_ONCE = 4, 20
HEAD = f"""{more_statements.HEAD}
import collections, json, math
import numpy as np
import torch
import torch.distributed as dist

R, G = dist.get_rank, 0

class O:
    __slots__ = ("v",)
    def __init__(self): self.v = 0
    def inc(self): self.v += 1

class P:
    def __init__(self): self.v = 0
    def inc(self): self.v += 1
"""
STATEMENTS = (
    "r = R()\nreturn (10, 20, 30, 40)[r]",
    "r = R()\nx = int(r / 2)\nreturn x",
    "r = R()\nx = r / 2\nreturn x",
    "r = R()\nx = 0.5 * r + 1\nreturn int(x * 2)",
    "r = R()\nx = int(float(r) * 1.5) + int(8 / (r + 1))\nreturn x",
    "r = R()\nx = (10, 20, 30, 40)[r]\nreturn x + r",
    "r = R()\nx = len([1] * r)\nreturn x",
    "r = R()\nx = list(range(r))\nreturn x",
    "r = R()\nx = sum(range(r))\nreturn x",
    "r = R()\nx = torch.arange(8.0)[range(r, r + 2)]\nreturn x",
    "r = R()\nx = torch.arange(8.0).chunk(4)[r]\nreturn x",
    "r = R()\nx = [0]\nx[0] = (1, 2, 3, 4)[r]\nreturn x",
    "r = R()\no = P()\no.v = (1, 2, 3, 4)[r]\nreturn o.v",
    "r = R()\nit = iter([1, 2, 3, 4])\nx = (next(it), 5)[r % 2]\nreturn (x, next(it))",
    "r = R()\nx = {0: 'a', 1: 'b', 2: 'c', 3: 'd'}[int(r)]\nreturn x",
    "r = R()\nx = y = (1, 2, 3, 4)[r]\nreturn x + y",
    "r = R()\na, *b = [(0, 1), (1, 2), (2, 3), (3, 4)][r]\nreturn b",
    "r = R()\nx = [i for i in (1, 2, 3, 4)][r] + (0 if r else 1)\nreturn x",
    "r = R()\nx = 1\ntry:\n    x = (1, 2)[r]\nexcept IndexError:\n    x = 9\nreturn x",
    "r = R()\nx = 5\ntry:\n    x = 8 / r\nexcept ZeroDivisionError:\n    x = 9\nreturn x",
    "r = R()\nt = torch.tensor([1, 2]) * R()\nreturn t.tolist()",
    "r = R()\nt = torch.tensor([[1, 2]]) == R()\nx = t.tolist()[0][0]\nreturn x",
    "r = R()\nt = torch.tensor([1, 2]) * R()\nreturn t.tolist() == [2, 4]",
    "r = R()\nfor i in range(3):\n    x = (1, 2, 3, 4)[r] + i\nreturn x",
    "r = R()\nreturn 'abcd'[r]",
    "r = R()\nreturn {0: 'a', 1: 'b', 2: 'c', 3: 'd'}[r]",
    "r = R()\nreturn r in {0, 2}",
    "r = R()\nreturn r in (0, 2)",
    "r = R()\nreturn len([1] * r)",
    "r = R()\nreturn '%d' % r",
    "r = R()\nreturn f'{r:02d}'",
    "r = R()\nreturn int(r)",
    "r = R()\nreturn list(range(r))",
    "r = R()\nreturn sorted([2, r])",
    "r = R()\nreturn max(r, 1)",
    "r = R()\nreturn sum([r, 1])",
    "r = R()\nx = r == 0 and 'a' or 'b'\nreturn x",
    "r = R()\nreturn any((r == i for i in (0, 3)))",
    "r = R()\nreturn [i for i in range(4) if i == r]",
    "r = R()\ni = 0\nwhile i < r:\n    i += 1\nreturn i",
    "r = R()\nmatch r:\n    case 0:\n        return 'zero'\n    case 1:\n        return 'one'\nreturn 'more'",
    "r = R()\nreturn np.arange(4)[r]",
    "r = R()\nreturn torch.arange(4)[r]",
    "r = R()\nreturn [1, 2, 3, 4][r:r + 1]",
    "r = R()\nreturn [1, 2, 3, 4][-r]",
    "r = R()\nl = [1, 2, 3, 4]\ndel l[r]\nreturn l",
    "r = R()\nl = [1, 2, 3, 4]\nl[r] = 9\nreturn l",
    "r = R()\nreturn divmod(r, 2)",
    "r = R()\nreturn math.ceil(r / 2)",
    "r = R()\nreturn json.dumps({'rank': r})",
    "r = R()\nreturn r / 2",
    "r = R()\nreturn 2 ** r",
    "r = R()\nreturn 1 if r % 2 == 0 else 0",
    "r = R()\nreturn [1, 2, 3, 4].index(r + 1)",
    "r = R()\nl = [5, 6, 7, 8]\nx = l[r] + l[(r + 1) % 4]\nreturn x",
    "r = R()\nl = [[1, 2], [3, 4], [5, 6], [7, 8]]\nreturn l[r][0]",
    "r = R()\nl = ['a', 'b', 'c', 'd']\nreturn l[r]",
    "r = R()\nl = [1, 2, 3, 4]\nreturn l[r] if r < 2 else -1",
    "r = R()\nl = [torch.tensor([float(i)]) for i in range(4)]\nreturn l[r]",
    "r = R()\nl = [1, 2, 3, 4]\ny = [l[r] for _ in range(2)]\nreturn y",
    "r = R()\nd = {}\nd[r] = 1\nreturn list(d)",
    "r = R()\nreturn (r == 0) + 1",
    "r = R()\nreturn not r",
    "r = R()\nreturn bool(r)",
    "r = R()\nreturn r or 5",
    "r = R()\nreturn r and 5",
    "r = R()\nreturn [r] * 2",
    "r = R()\nreturn tuple(reversed((r, 1)))",
    "r = R()\na, b = [(0, 1), (1, 2), (2, 3), (3, 4)][r]\nreturn a + b",
    "r = R()\nl = [3, 4, 5, 6]\nreturn sum(l[:r])",
    "r = R()\nl = [3, 4, 5, 6]\nreturn sum((x for i, x in enumerate(l) if i < r))",
    "r = R()\nimport itertools\nreturn list(itertools.islice([3, 4, 5, 6], r))",
    "r = R()\nimport bisect\nreturn bisect.bisect([0, 1, 2, 3], r)",
    "r = R()\nreturn abs(r - 2)",
    "r = R()\nreturn round(r / 3, 2)",
    "r = R()\nreturn torch.ones(4).chunk(4)[r]",
    "r = R()\nreturn torch.arange(8.0).split([1, 2, 2, 3])[r]",
    "r = R()\nreturn torch.zeros(r + 1).shape[0]",
    "r = R()\nreturn torch.Size([1, 2, 3, 4])[r]",
    "r = R()\nl = [1, 2, 3, 4]\nreturn l.pop(r)",
    "r = R()\nl = [0, 0, 0, 0]\nl[r] += 1\nreturn l",
    "r = R()\nreturn [None, 'a', None, 'b'][r] is None",
    "r = R()\nreturn bytes([1, 2, 3, 4])[r]",
    "r = R()\nreturn range(10, 14)[r]",
    "r = R()\nreturn next((i for i in range(4) if i >= r))",
    "r = R()\nout = []\nfor i in range(4):\n    if i == r:\n        continue\n    out.append(i)\nreturn out",
    "r = R()\nfor i in range(4):\n    if i == r:\n        break\nreturn i",
    "r = R()\nif r == 0:\n    return 'first'\nelif r == 3:\n    return 'last'\nreturn 'mid'",
    "r = R()\ntry:\n    x = [1, 2, 3, 4][r]\nexcept IndexError:\n    x = -1\nreturn x",
    "r = R()\nl = [1, 2, 3]\ntry:\n    x = l[r]\nexcept IndexError:\n    x = -1\nreturn x",
    "r = R()\nf = lambda i: [1, 2, 3, 4][i]\nreturn f(r)",
    "r = R()\nl = [1, 2, 3, 4]\nreturn list(map(l.__getitem__, [r]))",
    "r = R()\nfrom operator import itemgetter\nreturn itemgetter(r)([1, 2, 3, 4])",
    "r = R()\nreturn np.array([1, 2, 3, 4]).tolist()[r]",
    "r = R()\nreturn np.zeros(4) + r",
    "r = R()\nreturn torch.tensor([r])",
    "r = R()\nreturn torch.full((2,), r)",
    "r = R()\nreturn torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])[r, 1]",
    "r = R()\nreturn slice(r, None).start",
    "r = R()\nl = [[0] * 4 for _ in range(4)]\nreturn l[r][r]",
    "r = R()\nx = [1, 2, 3, 4]\ny = x[r]\nx.append(5)\nreturn (y, len(x))",
    "r = R()\nl = [1, 2, 3, 4]\nreturn l[r] == 2",
    "r = R()\nl = [1, 2, 3, 4]\nreturn (len(l), l[r], len(l))",
    "r = R()\nl = [1, 2, 3, 4]\nreturn (l[r], l[::-1][r])",
    "r = R()\nl = [1, 2, 3, 4]\nreturn l[r - 4]",
    "r = R()\nx = 0\nif r > 1 and r < 3:\n    x = r\nreturn x",
    "r = R()\nx = []\nif r:\n    x = x + [r]\nreturn len(x)",
    "r = R()\nx = 'even' if r % 2 == 0 else 'odd'\nreturn x + '!'",
    "r = R()\nn = 0\nfor i in range(3):\n    n += [1, 2, 3, 4][r]\nreturn n",
    "r = R()\na = np.zeros(3)\nif r == 0:\n    a += 1\nreturn a",
    "r = R()\na = bytearray(b'ab')\nif r == 0:\n    a += b'c'\nreturn bytes(a)",
    "r = R()\na = collections.deque([1])\nif r == 0:\n    a.append(2)\nreturn list(a)",
    "r = R()\na = [1]\nif r == 0:\n    a.append(2)\nreturn a",
    "r = R()\na = {'x': 1}\nif r == 0:\n    a['x'] = 2\nreturn a['x']",
    "r = R()\no = O()\nif r == 0:\n    o.inc()\nreturn o.v",
    "r = R()\no = P()\nif r == 0:\n    o.inc()\nreturn o.v",
    "r = R()\nx = torch.zeros(2)\nif r == 0:\n    x += 1\nreturn x",
    "r = R()\nx = torch.zeros(2)\nif r == 0:\n    x = x + 1\nreturn x",
    "r = R()\nx = torch.zeros(2)\nif r == 0:\n    x = x + 1\nelse:\n    x = x - r\nreturn x",
    "r = R()\nx = 0\nif r < 2:\n    if r == 1:\n        x = 5\n    else:\n        x = 7\nreturn x",
    "r = R()\nn = 0\nfor i in range(3):\n    if i < r:\n        n += i\nreturn n",
    "r = R()\ndef inner():\n    if r == 0:\n        return 1\n    return 2\nreturn inner()",
    "r = R()\nc = [0]\ndef inc():\n    c[0] += 1\nif r == 0:\n    inc()\nreturn c[0]",
    "global G\nG = 0\nr = R()\nif r == 0:\n    G = 1\nreturn G",
    "r = R()\ny = None\nif (z := (r * 2)) > 2:\n    y = z\nreturn y",
    "r = R()\nx = 1\ntry:\n    if r == 2:\n        x = 3\nfinally:\n    x = x + 1\nreturn x",
    "r = R()\nout = []\nfor i in range(4):\n    if i % 2 == r % 2:\n        out = out + [i]\nreturn out",
    "r = R()\nx = [i for i in range(3) if r > 1]\nreturn x",
    "r = R()\nx = (lambda a: a + 1 if a > 1 else a)(r)\nreturn x",
    "r = R()\nit = iter([1, 2, 3])\nx = next(it)\nif r == 0:\n    x = next(it)\ny = next(it)\nreturn (x, y)",
    "r = R()\nx = 0\nwhile x < 3:\n    x += 1\n    if x == r:\n        break\nreturn x",
    "r = R()\nx = torch.arange(4.0)\ny = x[r] if r != 3 else x.sum()\nreturn y",
    "r = R()\nt = torch.tensor([float(R())])\nx = 1\nif t.item() > 1:\n    x = 2\nreturn x",
    "r = R()\nt = torch.ones(2) * R()\nx = torch.zeros(2)\nif (t > 1).any():\n    x = t * 2\nreturn x",
    "r = R()\nrng = np.random.default_rng(0)\nv = 0.0\nif r == 0:\n    v = rng.random()\nw = rng.random()\nreturn w",
    "import random\nrandom.seed(0)\nr = R()\nv = 0\nif r == 0:\n    v = random.random()\nreturn random.random()",
    "torch.manual_seed(0)\nr = R()\nv = torch.zeros(1)\nif r == 0:\n    v = torch.rand(1)\nreturn torch.rand(1)",
    "r = R()\ns = set()\nif r == 0:\n    s |= {1}\nreturn sorted(s)",
    "r = R()\ns = frozenset()\nif r == 0:\n    s |= {1}\nreturn sorted(s)",
    "r = R()\nd = dict(a=1)\nif r == 0:\n    d |= {'b': 2}\nreturn sorted(d)",
    "r = R()\nd = dict(a=1)\nif r == 0:\n    d = {**d, 'b': 2}\nreturn sorted(d)",
    "r = R()\nc = collections.Counter()\nif r == 0:\n    c.update([1])\nreturn c[1]",
    "r = R()\nm = torch.nn.Linear(2, 2, bias=False)\nwith torch.no_grad():\n    m.weight.fill_(1.0)\nif r == 0:\n    with torch.no_grad():\n        m.weight.mul_(2)\nreturn m.weight.detach().sum()",
    "r = R()\nm = torch.nn.Linear(2, 2)\nif r == 0:\n    m.eval()\nreturn m.training",
    "r = R()\nx = torch.ones(2)\nif r == 0:\n    x.zero_()\nreturn x",
    "r = R()\nx = torch.ones(2, requires_grad=True)\nif r == 0:\n    x.requires_grad_(False)\nreturn x.requires_grad",
    "r = R()\na = np.zeros(3)\nb = a[1:]\nif r == 0:\n    b += 1\nreturn a",
    "r = R()\na = np.zeros(3)\nif r == 0:\n    np.add(a, 1, out=a)\nreturn a",
    "r = R()\na = np.zeros(3)\nif r == 0:\n    a.fill(2)\nreturn a",
    "r = R()\na = np.zeros(3)\nif r == 0:\n    a = a + 1\nreturn a",
    "r = R()\nl = [[1], [2]]\nif r == 0:\n    l[0].append(3)\nreturn l[0]",
    "r = R()\nl = [P()]\nif r == 0:\n    l[0].inc()\nreturn l[0].v",
    "r = R()\nl = [O()]\nif r == 0:\n    l[0].inc()\nreturn l[0].v",
    "r = R()\no = P()\no.inner = P()\nif r == 0:\n    o.inner.inc()\nreturn o.inner.v",
    "r = R()\no = P()\nf = o.inc\nif r == 0:\n    f()\nreturn o.v",
    "r = R()\nimport functools\no = P()\nf = functools.partial(P.inc, o)\nif r == 0:\n    f()\nreturn o.v",
    "r = R()\ng = (i for i in range(3))\nx = None\nif r == 0:\n    x = next(g)\nreturn list(g)",
    "r = R()\nx = torch.zeros(3)\nn = x.numpy()\nif r == 0:\n    n += 1\nreturn x",
    "r = R()\nq = [1, 2]\nif r == 0:\n    q.sort(reverse=True)\nreturn q",
    "r = R()\nx = 1 if r == 0 else 2\ny = x * 10\nreturn y",
    "r = R()\nx = (1 if r == 0 else 2) + (3 if r == 1 else 4)\nreturn x",
    "r = R()\nx = [1 if r == i else 0 for i in range(4)]\nreturn x",
    "r = R()\nx = {'a': 1 if r == 0 else 2}\nreturn x['a']",
    "r = R()\nx = P()\nx.v = 1 if r == 0 else 2\nreturn x.v",
    "r = R()\nx = 3\nassert r >= 0\nif not r:\n    x = 4\nreturn x",
    "r = R()\nx = 0\nif r == 0 or r == 3:\n    x = 1\nreturn x",
    "r = R()\nx = 0\nif 0 < r < 3:\n    x = 1\nreturn x",
    "r = R()\nx = 'z'\nif r in (1, 2):\n    x = 'in'\nreturn x",
    "r = R()\nx = 'z'\nif r not in [1, 2]:\n    x = 'out'\nreturn x",
    "r = R()\nd = {0: 'a', 2: 'b'}\nx = 'none'\nif r in d:\n    x = 'some'\nreturn x",
    "r = R()\na, b = (1, 2)\nif r == 1:\n    a, b = (b, a)\nreturn (a, b)",
    "r = R()\nx = 0\nif r == 1:\n    x += 1\n    x *= 5\nreturn x",
    "r = R()\nx = torch.ones(2)\nif r == 1:\n    del x\n    x = 3\nreturn x if isinstance(x, int) else 0",
    "r = R()\nx = 0\nif r == 2:\n    for i in range(3):\n        x += i\nreturn x",
    "r = R()\nx = 0\nif r == 2:\n    while x < 5:\n        x += 2\nreturn x",
    "r = R()\nx = 0\nif r == 2:\n\n    def f():\n        return 9\n    x = f()\nreturn x",
    "r = R()\nx = 0\nif r == 2:\n    x = [i * i for i in range(4)]\nelse:\n    x = []\nreturn x",
    "r = R()\nx = 0\nif r == 2:\n    with torch.no_grad():\n        x = torch.ones(1) * 3\nreturn x",
    "r = R()\nx = 0\nif r == 2:\n    try:\n        x = 1 // 0\n    except ZeroDivisionError:\n        x = -1\nreturn x",
    "r = R()\nx = torch.arange(4.0)\ny = [x * i for i in range(3)]\nz = y[r % 3]\nreturn z",
    "r = R()\nx = torch.zeros(4)\nx[r] = 1\nreturn x",
    "r = R()\nx = torch.zeros(4, 4)\nx[r, :] = 2.0\nx[:, r] += 1\nreturn x",
    "r = R()\nx = torch.arange(8.0)\nreturn x[r * 2:(r + 1) * 2]",
    "r = R()\nx = torch.arange(8.0)\nreturn x.narrow(0, r, 2)",
    "r = R()\nx = torch.arange(8.0)\nreturn x[r:].sum()",
    "r = R()\nreturn torch.arange(r + 1)",
    "r = R()\nreturn torch.arange(r, 8, 2)",
    "r = R()\nreturn torch.linspace(0, r + 1, 5)",
    "r = R()\nreturn torch.full((2,), float(r))",
    "r = R()\nreturn torch.ones(2) * r",
    "r = R()\nreturn torch.ones(2) ** r",
    "r = R()\nreturn torch.roll(torch.arange(4), r)",
    "r = R()\nreturn torch.arange(6).view(2, 3).select(1, r % 3)",
    "r = R()\nreturn torch.nn.functional.pad(torch.ones(2), (r, 3 - r))",
    "r = R()\nreturn torch.where(torch.arange(4) < r, 1, 0)",
    "r = R()\nreturn (torch.arange(4) == r).int()",
    "r = R()\nreturn torch.nn.functional.one_hot(torch.tensor(r), 4)",
    "r = R()\nreturn torch.eye(4)[r]",
    "r = R()\nreturn torch.tensor([r, r + 1])",
    "r = R()\nreturn torch.tensor(r).float() / 2",
    "r = R()\nreturn torch.arange(4.0).index_select(0, torch.tensor([r]))",
    "r = R()\nreturn torch.arange(12).chunk(4)[r].sum()",
    "r = R()\nreturn torch.arange(12).tensor_split(5)[r]",
    "r = R()\nreturn torch.cat([torch.ones(2) * i for i in range(r + 1)])",
    "r = R()\ntorch.manual_seed(r)\nreturn torch.rand(2)",
    "torch.manual_seed(5)\nx = torch.rand(2)\nr = R()\nreturn x + r",
    "r = R()\ng = torch.Generator().manual_seed(r)\nreturn torch.rand(2, generator=g)",
    "r = R()\nreturn torch.randint(0, r + 2, (1,)).max() <= r + 1",
    "r = R()\nx = torch.arange(4.0)\nreturn x.repeat(r + 1).shape[0]",
    "r = R()\nx = torch.arange(4.0)\nreturn x.expand(r + 1, 4).sum()",
    "r = R()\nreturn torch.ones(3, r + 1) @ torch.ones(r + 1, 2)",
    "r = R()\nx = torch.ones(4)\nx.mul_(r)\nreturn x",
    "r = R()\nx = torch.ones(4)\nx[:r] = 0\nreturn x",
    "r = R()\nx = torch.ones(4)\nx[r:] = 0\nreturn x.sum().item()",
    "r = R()\nreturn torch.ones(4).unflatten(0, (2, 2))[r % 2].sum()",
    "r = R()\nreturn len(torch.arange(r + 2))",
    "r = R()\nreturn [t.item() for t in torch.arange(r + 1)]",
    "r = R()\nreturn torch.arange(r + 1).tolist()",
    "r = R()\nx = torch.tensor([1.0, 2.0, 3.0, 4.0])\nreturn x[x > r]",
    "r = R()\nx = torch.tensor([1.0, 2.0, 3.0, 4.0])\nreturn x.masked_select(x > r).numel()",
    "r = R()\nx = torch.tensor([3.0, 1.0, 2.0, 0.0]) * (r + 1)\nreturn (x.argmax(), x.max().item())",
    "r = R()\nx = torch.tensor([3.0, 1.0, 2.0, 0.0]) - r\nreturn (x > 0).nonzero()",
    "r = R()\nx = torch.tensor([3.0, 1.0, 2.0, 0.0]) - r\nreturn torch.unique(x.clamp(min=0))",
    "r = R()\nx = torch.tensor(r)\ny = torch.zeros(1)\nreturn x.item() + 1",
    "r = R()\nreturn bool(torch.tensor(r) > 1)",
    "r = R()\nx = torch.tensor(r)\nreturn 'big' if x > 1 else 'small'",
    "r = R()\na = torch.tensor(r).numpy()\nreturn a",
    "r = R()\nreturn float(torch.tensor(float(r)))",
    "r = R()\nreturn math.sqrt(r)",
    "r = R()\nreturn np.ones(2) * r",
    "r = R()\nreturn torch.ones(2) * math.sqrt(r)",
    "r = R()\nreturn torch.ones(2) / (r + 1)",
    "r = R()\nreturn torch.ones(2) * (r / 2)",
    "r = R()\nreturn torch.ones(2) * (r // 2)",
    "r = R()\nreturn torch.ones(2) * (r % 2)",
    "r = R()\nreturn torch.ones(2) * -r",
    "r = R()\nreturn torch.ones(2) * abs(r - 2)",
    "r = R()\nreturn torch.ones(2) * min(r, 2)",
    "r = R()\nreturn torch.ones(2) * (r == 2)",
    "r = R()\nreturn torch.ones(2) * int(r == 2)",
    "r = R()\nreturn torch.ones(2) * float(r)",
    "r = R()\nreturn torch.ones(2) * (1 << r)",
    "r = R()\nreturn torch.ones(2) * (r & 1)",
    "r = R()\nreturn torch.ones(2) * (r ^ 1)",
    "r = R()\nreturn torch.ones(2) * 2 ** r",
    "r = R()\nreturn torch.ones(2) * ((r + 1) % 4)",
    "r = R()\nreturn torch.ones(2) * sum(range(4))",
    "r = R()\nreturn torch.ones(2).add(torch.ones(2), alpha=r)",
    "r = R()\nreturn torch.clamp(torch.arange(4.0), max=r)",
    *more_statements.STATEMENTS,
)  # fmt: skip


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The statements as functions of a file: lockstep looks at the source of what it runs for some ranks."""
    file = tmp_path_factory.mktemp("statements") / "statements_of_ranks.py"
    bodies = ("    " + body.replace("\n", "\n    ") for body in STATEMENTS)
    file.write_text(HEAD + "".join(f"\ndef s{at}():\n{body}\n" for at, body in enumerate(bodies)))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


def plain(value, rank):
    """A value as plain data, that of one rank."""
    if isinstance(value, lt.LocalTensor):
        return "tensor", value.on(rank).tolist()
    if isinstance(value, torch.SymInt | torch.SymBool):
        return on_rank(value, rank)
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__.lower(), value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(plain(one, rank) for one in value)
    return value


def on_each_rank(program, module):
    found = []
    for rank in range(RANKS):
        module.reset()
        module.R = lambda rank=rank: rank
        try:
            found.append(plain(program(), rank))
        except Exception as error:  # why: what plain Python raises is what the rank gets
            found.append(type(error))
    return found


@pytest.mark.few(8)
@pytest.mark.parametrize("first", range(0, len(STATEMENTS), AT_ONCE))
def test_a_statement_is_that_of_each_rank_or_refused(programs, first):
    wrong = []
    for at in range(first, min(first + AT_ONCE, len(STATEMENTS))):
        program = getattr(programs, f"s{at}")
        want = on_each_rank(program, programs)
        programs.reset()
        programs.R = dist.get_rank
        try:
            with lt.LocalTensorMode(RANKS):
                done = program()
                found = [plain(done, rank) for rank in range(RANKS)]
        except Exception:  # why: an error, of whichever class, is not silent
            continue
        if found != want:
            wrong.append((STATEMENTS[at], found, want))
    assert not wrong


def test_not_every_statement_is_refused(programs):
    served = 0
    programs.R = dist.get_rank
    for at in itertools.islice(range(len(STATEMENTS)), 0, None, 4):
        try:
            with lt.LocalTensorMode(RANKS):
                getattr(programs, f"s{at}")()
            served += 1
        except Exception:  # why: counted
            continue
    assert served >= len(STATEMENTS) // 4 // 4
