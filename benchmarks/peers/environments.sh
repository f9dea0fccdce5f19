#!/bin/sh
# Environments for the libraries that Mooring is measured against:  sh benchmarks/peers/environments.sh FOLDER
set -e
mkdir -p "$1"
for name in fedjax pfl flower trees; do python3 -m venv "$1/$name"; done
"$1/fedjax/bin/pip" install fedjax==0.0.17 jax==0.4.25 jaxlib==0.4.25 'numpy<2' 'scipy<1.13' optax==0.2.1 \
    dm-haiku==0.0.12 chex==0.1.85
"$1/pfl/bin/pip" install 'pfl[pytorch]==0.6.0'
"$1/flower/bin/pip" install 'flwr[simulation]==1.41.0' torch
"$1/trees/bin/pip" install lightgbm==4.7.0 gpboost==1.8.0 scikit-learn==1.9.1 pandas==3.1.1 pyarrow==26.0.1 \
    statsmodels==0.15.0
