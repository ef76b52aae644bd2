"""Checks made before anything is trusted.

The certificate: six laws that every objective, estimator and aggregation has to keep.

findings.py          what a law measured, and the certificate made of it
tabular.py           the exact world: all sequences of a tiny vocabulary, and derivatives without autograd
coefficients.py      what each objective is documented to do with one token, in plain Python numbers
advantage_truth.py   what each estimator is documented to climb, in closed form
subjects.py          an objective under test, and the streams that it is tested on
objective_*.py       the laws for policy objectives; algorithm_oracle.py: from rewards to gradient
advantage_laws.py, credit_laws.py, kl_laws.py, aggregation_laws.py
members.py           what is certified: one explicit dict
user_function.py     a user's own "path.py:function"
certificate.py       certify(name), certify_file("path.py:function"), certify_objective(name, kind, setting)

The acceleration contract: what a faster sampling path has to show before training may use it.

acceleration.py      the paths, their classes, and `require`
gates.py             verdicts, the key of a path, the store of records
gate_*.py            A distribution, B speed, C learning, I identity
acceptance.py        how the draft of speculative decoding fares
"""
