# vLLM with kvferry, for every container of deploy/kubernetes/vllm. In a clone of this repository:
#   make release-check     # or, of what is not committed: pip wheel --no-deps --wheel-dir dist .
#   docker build --file deploy/images/vllm.Dockerfile --tag kvferry-vllm:0.1.0 .
ARG ENGINE=vllm/vllm-openai:v0.32.0
FROM ${ENGINE}
COPY dist/kvferry-*.whl /tmp/
# The engine's own torch stays. curl is for probes of several ranks.
RUN pip install --no-cache-dir "$(ls /tmp/kvferry-*.whl)[nixl,up]" && rm /tmp/kvferry-*.whl && command -v curl
ENTRYPOINT []
