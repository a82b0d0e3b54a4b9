# SGLang and its router with kvferry, for every container of deploy/kubernetes/sglang. In a clone of this repository:
#   make release-check     # or, of what is not committed: pip wheel --no-deps --wheel-dir dist .
#   docker build --file deploy/images/sglang.Dockerfile --tag kvferry-sglang:0.1.0 .
ARG ENGINE=lmsysorg/sglang:v0.5.23
FROM ${ENGINE}
COPY dist/kvferry-*.whl /tmp/
# The engine's own torch stays. curl is for probes of several ranks.
RUN pip install --no-cache-dir "$(ls /tmp/kvferry-*.whl)[nixl,up]" sglang-router && rm /tmp/kvferry-*.whl && command -v curl
ENTRYPOINT []
