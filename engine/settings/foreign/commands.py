"""Commands and defaults of other servers, with what there is here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings.foreign.row import FASTDEPLOY, LLAMA, PADDLENLP, RANK_TABLE, SGLANG, TGI, VLLM


@dataclass(frozen=True)
class Command:
    server: str
    theirs: str
    here: str
    remark: str = ""


@dataclass(frozen=True)
class Deviation:
    """A default or behaviour that is another one here, on purpose."""

    what: str
    theirs: str
    here: str
    reason: str


DOCKER_BUILD = "docker build -f dockerfiles/Dockerfile.cuda -t llm-server ."
NO_ASCEND = "runs on NVIDIA GPUs and CPUs; Ascend devices are not supported"
INSTANCES = (
    "the same as `start_server --foreground`, which reads the rank tables of the environment; on CPUs, the number of"
    " devices is the number of ranks"
)
TABLES = "the same files; `device_ip` is the address of the RDMA interface, or that of the host without one"

SAME_CONTAINER = "with an image that was built here: see docs/operation.md"

COMMANDS = (
    Command(PADDLENLP, "start_server", "start_server"),
    Command(PADDLENLP, "start_server $model_name", "start_server $model_name"),
    Command(PADDLENLP, "stop_server", "stop_server", "waits for running requests"),
    Command(PADDLENLP, "mpirun start_server", "mpirun start_server", "or `start_server` on each machine"),
    Command(PADDLENLP, "mpirun stop_server", "mpirun stop_server"),
    Command(
        PADDLENLP,
        "python download_model.py --model_name M --dir D --nnodes 2 --mode master",
        "python download_model.py --model_name M --dir D --nnodes 2 --mode master",
        "from the Hugging Face hub; ready-made static graphs come from a MODEL_MIRROR",
    ),
    Command(
        PADDLENLP,
        "python download_model.py --speculate_model_path D",
        "python download_model.py",
        "the option needs a MODEL_MIRROR: in a checkpoint of the hub the draft layer is part of the model",
    ),
    Command(
        PADDLENLP,
        "docker run --gpus all --privileged --cap-add=SYS_PTRACE --network=host --shm-size=5G -v D:/models/ IMAGE",
        "docker run --gpus all --network=host --shm-size=5G -v D:/models/ IMAGE",
        SAME_CONTAINER,
    ),
    Command(PADDLENLP, "docker exec -it paddlenlp_serving /bin/bash", "the same"),
    Command(PADDLENLP, "ls /models/", "the same"),
    Command(
        PADDLENLP,
        "docker run -v $MODEL_PATH:/models IMAGE /bin/bash -c -ex 'start_server $model_name && tail -f /dev/null'",
        "the same",
        "a root-owned folder is given to the server's user; `docker stop` lets requests end",
    ),
    Command(PADDLENLP, "python /opt/output/download_model.py", "the same"),
    Command(
        PADDLENLP,
        "docker build -f ./dockerfiles/Dockerfile_serving_cuda124_cudnn9",
        "the same",
        "another name of dockerfiles/Dockerfile.cuda",
    ),
    Command(PADDLENLP, "Dockerfile_serving_cuda118_cudnn8", "", "V100 and T4 are too old: see docs/gpu.md"),
    Command(PADDLENLP, "git clone https://github.com/PaddlePaddle/PaddleNLP.git", "a clone of this repository"),
    Command(PADDLENLP, "nvidia-smi", "nvidia-smi"),
    Command(
        FASTDEPLOY,
        "python -m fastdeploy.entrypoints.openai.api_server --model M",
        "start_server --foreground --model M",
        "without `--foreground` it returns when the server is ready",
    ),
    Command(FASTDEPLOY, "fastdeploy serve M", "start_server --foreground M"),
    Command(FASTDEPLOY, "fastdeploy run-batch -i IN -o OUT", "run_batch -i IN -o OUT", "asks a running server"),
    Command(FASTDEPLOY, "LLM(model=M, max_model_len=4096)", "the same", "M is a folder; `from engine.llm import LLM`"),
    Command(FASTDEPLOY, "@support_graph_optimization", "", "every model is a static graph: see docs/adding.md"),
    Command(VLLM, "vllm serve M", "start_server --foreground M"),
    Command(VLLM, "python -m vllm.entrypoints.openai.api_server --model M", "start_server --foreground --model M"),
    Command(VLLM, "vllm run-batch -i IN -o OUT", "run_batch -i IN -o OUT", "asks a running server"),
    Command(RANK_TABLE, "sh start_servers.sh --model=M", "start_servers.sh --model=M", INSTANCES),
    Command(RANK_TABLE, "python pd_ranktable_tools.py --mode gen", "pd_ranktable_tools.py --mode gen", TABLES),
    Command(RANK_TABLE, "python pd_ranktable_tools.py --mode merge", "pd_ranktable_tools.py --mode merge", TABLES),
    Command(RANK_TABLE, "hccn_tool -i 0 -ip -g", "", "pd_ranktable_tools.py writes the address of the RDMA interface"),
    Command(RANK_TABLE, "sh build_image.sh --base-image=B --image-name=I", DOCKER_BUILD, NO_ASCEND),
    Command(RANK_TABLE, "unzip AscendCloud-*.zip", "a clone of this repository"),
    Command(RANK_TABLE, "docker pull {image_url}", DOCKER_BUILD),
    Command(RANK_TABLE, "docker run -itd --device=/dev/davinci4", "docker run --gpus all", NO_ASCEND),
    Command(RANK_TABLE, "docker exec -it -u ma-user ${container-name} /bin/bash", "docker exec -it C /bin/bash"),
    Command(RANK_TABLE, "npu-smi info", "nvidia-smi", NO_ASCEND),
    Command(RANK_TABLE, "docker -v", "docker -v"),
    Command(RANK_TABLE, "yum install -y docker-engine.aarch64", "the same", "any Docker of the system"),
    Command(RANK_TABLE, "sysctl -p", "", "with `docker run --network=host` nothing is forwarded"),
    Command(RANK_TABLE, "sed -i s/net.ipv4.ip_forward=0/.../ /etc/sysctl.conf", "", "nothing is forwarded"),
    Command(RANK_TABLE, "docker images", "docker images"),
    Command(RANK_TABLE, "curl http://IP:8080/v1/chat/completions", "curl http://IP:9965/v1/chat/completions"),
    Command(RANK_TABLE, "df -h", "df -h"),
    Command(SGLANG, "python -m sglang.launch_server --model-path M", "start_server --foreground --model-path M"),
    Command(SGLANG, "sglang serve --model-path M", "start_server --foreground --model-path M"),
    Command(TGI, "text-generation-launcher --model-id M", "start_server --foreground --model-id M"),
    Command(LLAMA, "llama-server -m M", "start_server --foreground -m M", "M may be a GGUF file"),
)

DEVIATIONS = (
    Deviation("`MP_NUM`", "8", "1", "A start without settings works on any machine, also without GPUs."),
    Deviation(
        "`BLOCK_BS`",
        "50",
        "from the free memory",
        "A fixed number fails on small devices and leaves memory of large ones unused; an explicit value is honoured.",
    ),
    Deviation(
        "`OUTPUT_LOG_TO_CONSOLE`",
        "1: what tritonserver prints goes to the file `log/console.log`",
        "1: `start_server --foreground` copies all logs to its output",
        "The files of FD_LOG_DIR are always written; the name says that logs go to the console.",
    ),
    Deviation(
        "`max_tokens` of OpenAI's requests",
        "16 (completions of vLLM)",
        "as many as model and `MAX_DEC_LEN` allow",
        "An answer that is cut after 16 tokens is hardly ever what is meant.",
    ),
    Deviation(
        "Log lines",
        "`Reset block num, the total_block_num:17220` in `log/fastdeploy.log`; requests with their texts",
        "`ready: 17220 blocks of 64 tokens` in `log/infer_server.log`; requests with their ids",
        "Texts may be confidential.",
    ),
    Deviation(
        "`paddlepaddle-gpu`",
        "runs the model",
        "torch runs it; `paddlepaddle` exports it",
        "[the reasons](gpu-kernels.md#why-not-paddlepaddle-gpu).",
    ),
    Deviation(
        "A chat whose roles do not alternate",
        "the documents' example has user, system, user",
        "every message is handed to the model's chat template as it is, none is merged; a template that wants other"
        " roles refuses them with an error (400)",
        "Merged messages would be another prompt than the one that was asked for.",
    ),
    Deviation(
        "Prefix caching, chunked prefill, CUDA graphs",
        "off, and not all together",
        "on, all together, also on several GPUs",
        "They work together, so that there is nothing to choose between.",
    ),
    Deviation(
        "`--batch-size`",
        "tokens of a step (llama-server)",
        "requests of a step; `--max-num-batched-tokens` limits its tokens",
        "It is the option of the setting BATCH_SIZE.",
    ),
    Deviation(
        "`--max-waiting-tokens`",
        "steps until waiting requests join (Text Generation Inference)",
        "tokens of all waiting prompts together",
        "It is the option of the setting MAX_WAITING_TOKENS; requests join at every step.",
    ),
    Deviation(
        "`--max-total-tokens`",
        "tokens of the KV cache (SGLang)",
        "prompt and answer together; `--block-bs` or `--num-gpu-blocks-override` says how large the KV cache is",
        "It is also an option of Text Generation Inference.",
    ),
    Deviation(
        "Reasoning in answers",
        "`reasoning` (newer versions of vLLM)",
        "`reasoning_content`; messages of a request may have either",
        "SGLang, FastDeploy, llama-server and older versions of vLLM call it so.",
    ),
    Deviation(
        "`start_server`",
        "returns 0 at once, whether or not the model can be loaded",
        "returns 0 when a real request has been answered through every port",
        "A script can go on with requests.",
    ),
    Deviation(
        "Default ports of FastDeploy and vLLM",
        "8000 to 8003",
        "9965 (HTTP), 8110 (health), 8811 (gRPC), 8722 (metrics)",
        "They are the PaddleNLP server's; `--port 8000` sets another one.",
    ),
)
