"""Geometric transformers in numpy, from the formulas of their papers; the words are the columns of Z."""

from __future__ import annotations

import numpy as np


def softmax_columns(C):
    e = np.exp(C - C.max(0))
    return e / e.sum(0)


def correlated_attention(Z, A, *, add=False):
    """`Z softmax(Z^T A Z)`."""
    return Z @ softmax_columns(Z.T @ A @ Z) + (Z if add else 0)


def standard_attention(Z, PQ, PK, PV, *, add=False):
    """`P_V^T Z softmax((P_Q^T Z)^T (P_K^T Z) / sqrt(d))` of each head, concatenated by rows."""
    d = len(Z)
    heads = [
        v.T @ Z @ softmax_columns((q.T @ Z).T @ (k.T @ Z) / np.sqrt(d)) for q, k, v in zip(PQ, PK, PV, strict=True)
    ]
    return np.vstack(heads) + (Z if add else 0)


def resnet(Z, steps, activation=np.tanh):
    """`z + s(W z + b)`, applied repeatedly."""
    for W, b in steps:
        Z = Z + activation(W @ Z + b[:, None])
    return Z


def cayley(Z, A, form):
    """`Z (I - C)(I + C)^-1`."""
    d, n = Z.shape
    C = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if form == "skew":
                C[i, j] = Z[:, i] @ A @ Z[:, j]
            elif i > j:
                C[i, j] = Z[:, i] @ A @ Z[:, j] / np.sqrt(d)
                C[j, i] = -C[i, j]
    return Z @ (np.eye(n) - C) @ np.linalg.inv(np.eye(n) + C)


def unpack(S, d, side):
    """Return a matrix from its packed entries, with indices from 1 as in the Julia package."""
    M = np.zeros((d, d))
    for i in range(1, d + 1):
        for j in range(1, d + 1):
            if i > j and side in ("lower", "skew"):
                M[i - 1, j - 1] = S[(i - 2) * (i - 1) // 2 + j - 1]
            if i < j and side == "upper":
                M[i - 1, j - 1] = S[(j - 2) * (j - 1) // 2 + i - 1]
            if i < j and side == "skew":
                M[i - 1, j - 1] = -S[(j - 2) * (j - 1) // 2 + i - 1]
    return M


def triangular(Z, S, side, bias=None, activation=None):
    """`x + s(L x + b)`."""
    inner = unpack(S, len(Z), side) @ Z + (0 if bias is None else bias[:, None])
    return Z + (inner if activation is None else activation(inner))
