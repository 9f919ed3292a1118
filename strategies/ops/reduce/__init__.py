"""Rules: reductions, norms, softmax, scans."""
