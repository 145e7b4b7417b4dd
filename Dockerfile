# The two commands in a container:
#
#   docker build -t petridish .
#   docker run --rm petridish               make search
#   docker run --rm petridish make test
FROM python:3.11-slim-bookworm

# make, a compiler for the kernels, which are compiled on first use, and ps, by which NNI finds the
# processes of a trial that it stops.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev make procps \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home petridish
USER petridish
WORKDIR /home/petridish/nni_petridish

# The packages first: they are downloaded again only when their versions change.
COPY --chown=petridish Makefile setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=petridish nni_petridish/__init__.py nni_petridish/
COPY --chown=petridish nni_petridish/_support/ nni_petridish/_support/
COPY --chown=petridish search_spaces/__init__.py search_spaces/
RUN make .venv/installed

COPY --chown=petridish . .
# The copied files may be newer than the mark of the installation.
RUN touch .venv/installed

CMD ["make", "search"]
