# For a machine with an NVIDIA GPU. The image holds the requirements, and the code is mounted, so that you can change it.
#
#     docker build -t rl-textbook .
#     docker run --rm -it --gpus all --network host -v "$PWD":/textbook -v ~/.cache/huggingface:/root/.cache/huggingface \
#         rl-textbook python experiment_base/train.py --model Qwen/Qwen2.5-0.5B-Instruct --gradient-checkpointing --watch
#
# The wheels of PyTorch bring CUDA. The machine needs the driver and the NVIDIA Container Toolkit. --network host lets
# your browser reach the page of --watch. Not built, and not run on a GPU: only its pip commands were tried.
FROM python:3.12-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git && rm -rf /var/lib/apt/lists/* && \
    git config --system --add safe.directory /textbook
WORKDIR /textbook
COPY pyproject.toml ./
RUN python -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; x = p["optional-dependencies"]; \
    print(*p["dependencies"], *x["wandb"], *x["quantization"], *x["search"], *x["test"], sep="\n")' > /requirements.txt && \
    pip install --no-cache-dir -r /requirements.txt
# experiment_engine starts a vLLM server from its own environment: --engine-start /engine-env/bin/python
# RUN python -m venv /engine-env && /engine-env/bin/pip install --no-cache-dir vllm==0.32.0
ENV PYTHONPATH=/textbook NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["bash"]
