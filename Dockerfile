# The command in a container, with the versions of constraints.txt, torch among them:
#   docker build -t localtensor .
#   docker run --rm -v "$PWD:/project" localtensor gate --rules my_rules
# torch from the default index is the build for GPUs; --build-arg PIP_EXTRA_INDEX_URL=... names an index with a build for CPUs.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim
ARG PIP_EXTRA_INDEX_URL=
# git: `localtensor gate --changed` reads the history; the project belongs to another user than the one in here.  Its version is
# that of the base image: Debian keeps no older one, so that a pinned version would not be found after its next update.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git \
 && rm -rf /var/lib/apt/lists/* \
 && git config --system --add safe.directory /project \
 && useradd --create-home --uid 1000 tester
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY localtensor localtensor
COPY strategies strategies
RUN pip install --no-cache-dir -c constraints.txt . pytest && rm -rf build ./*.egg-info
ENV PYTHONPATH=/project OMP_NUM_THREADS=1
USER 1000
WORKDIR /project
ENTRYPOINT ["localtensor"]
CMD ["--help"]
