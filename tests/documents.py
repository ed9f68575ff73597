"""Commands and requests from five documents of other servers, with addresses and paths replaced, and their results
here: a start sets variables or fails with a sentence, a request is answered or refused with one.
"""

from __future__ import annotations

import json

PARAMETERS = "FastDeploy: parameters"
PADDLENLP = "PaddleNLP: deployment of static graphs"
ERNIE = "FastDeploy: best practice of ERNIE-4.5-21B-A3B"
PREFILL_GRAPHS = "FastDeploy: prefill in CUDA graphs"
RANK_TABLES = "Ascend: prefill and decode on separate instances"

# (document, environment and options of a start, the variables that it sets | the error)
Started = dict[str, str]
OF_TOOL = "is not supported: it is an option of pd_ranktable_tools.py"
GRAPHS = [
    *[1, 2, 4],
    *[8 * i for i in range(1, 17)],
    *[16 * i for i in range(9, 17)],
    *[32 * i for i in range(9, 33)],
]
DOCUMENTED_SIZES = json.dumps({"cudagraph_capture_sizes": GRAPHS}, separators=(",", ":"))
OF_PARAMETERS: tuple[tuple[str, Started | str], ...] = (
    ("--port 8000", {"SERVICE_HTTP_PORT": "8000"}),
    ("--metrics-port 8001", {"METRICS_HTTP_PORT": "8001"}),
    ("--max-waiting-time -1", {"QUEUE_TIMEOUT": "0"}),
    ("--max-waiting-time 60", {"QUEUE_TIMEOUT": "60"}),
    ("--max-concurrency 512", {"MAX_CACHED_TASK_NUM": "462"}),
    ("--engine-worker-queue-port 8002", {"ENGINE_WORKER_QUEUE_PORT": "8002"}),
    ("--cache-queue-port 8003", {"HEALTH_HTTP_PORT": "8003"}),
    ("--max-model-len 2048", {"MAX_MODEL_LEN": "2048"}),
    ("--tensor-parallel-size 1", {"MP_NUM": "1"}),
    ("--data-parallel-size 1", {"DATA_PARALLEL_SIZE": "1"}),
    ("--data-parallel-size 2", {"DATA_PARALLEL_SIZE": "2"}),
    ("--block-size 64", {"BLOCK_SIZE": "64"}),
    ("--max-num-seqs 8", {"BATCH_SIZE": "8"}),
    ("--max-num-seqs 128", {"BATCH_SIZE": "128"}),
    (
        """--mm-processor-kwargs '{"image_min_pixels": 3136, "video_fps": 2}'""",
        {"MM_PROCESSOR_KWARGS": '{"image_min_pixels": 3136, "video_fps": 2}'},
    ),
    ("--tokenizer /models/other", "the tokenizer is the one in the model's folder"),
    ("--use-warmup 1", {"USE_WARMUP": "1"}),
    (
        """--limit-mm-per-prompt '{"image": 10, "video": 3}'""",
        {"LIMIT_MM_PER_PROMPT": '{"image": 10, "video": 3}'},
    ),
    ("--enable-mm", {"ENABLE_MM": "1"}),
    ("--quantization wint4", {"QUANT_TYPE": "weight_only_int4"}),
    ("--quantization wint8", {"QUANT_TYPE": "weight_only_int8"}),
    ("--gpu-memory-utilization 0.9", {"GPU_MEMORY_UTILIZATION": "0.9"}),
    ("--num-gpu-blocks-override 17220", {"NUM_GPU_BLOCKS_OVERRIDE": "17220"}),
    ("--max-num-batched-tokens 2048", {"MAX_NUM_BATCHED_TOKENS": "2048"}),
    ("--kv-cache-ratio 0.75", {"BLOCK_RATIO": "0.75"}),
    ("--enable-prefix-caching", {"ENABLE_PREFIX_CACHING": "1"}),
    ("--swap-space 50", {"SWAP_SPACE": "50"}),
    ("--enable-chunked-prefill", {}),
    ("--max-num-partial-prefills 1", {"MAX_NUM_PARTIAL_PREFILLS": "1"}),
    ("--max-long-partial-prefills 1", {"MAX_LONG_PARTIAL_PREFILLS": "1"}),
    ("--long-prefill-token-threshold 81", {"LONG_PREFILL_TOKEN_THRESHOLD": "81"}),
    ("--static-decode-blocks 2", {}),
    ("--reasoning-parser ernie-x1", {"REASONING_PARSER": "ernie-x1"}),
    ("--use-cudagraph", {"USE_CUDAGRAPH": "1"}),
    (
        """--graph-optimization-config '{"use_cudagraph":false, "graph_opt_level":0, """
        """"cudagraph_capture_sizes": null }'""",
        {"USE_CUDAGRAPH": "0"},
    ),
    ("""--graph-optimization-config '{"use_cudagraph":true}'""", {"USE_CUDAGRAPH": "1"}),
    ("""--graph-optimization-config '{"graph_opt_level":1}'""", {}),
    ("""--graph-optimization-config '{"graph_opt_level":2}'""", {}),
    (
        """--graph-optimization-config '{"cudagraph_capture_sizes": [1, 3, 5, 7, 9]}'""",
        {"CUDAGRAPH_CAPTURE_SIZES": "1,3,5,7,9"},
    ),
    (f"--graph-optimization-config '{DOCUMENTED_SIZES}'", {"CUDAGRAPH_CAPTURE_SIZES": ",".join(map(str, GRAPHS))}),
    ("--enable-custom-all-reduce", {}),
    ("--splitwise-role mixed", {}),
    ("--splitwise-role prefill", {"SPLITWISE_ROLE": "prefill"}),
    (
        "--splitwise-role decode --innode-prefill-ports 7013",
        {"SPLITWISE_ROLE": "decode", "INNODE_PREFILL_PORTS": "7013"},
    ),
    ("--guided-decoding-backend auto", {}),
    ("--guided-decoding-backend xgrammar", {}),
    ("--guided-decoding-backend off", {}),
    ("--guided-decoding-disable-any-whitespace", {"GUIDED_DECODING_DISABLE_ANY_WHITESPACE": "1"}),
    ("""--speculative-config '{"method": "ngram", "num_speculative_tokens": 1}'""", {"SPECULATE_METHOD": "ngram"}),
    ("""--speculative-config '{"method": "suffix"}'""", {"SPECULATE_METHOD": "suffix"}),
    ("--dynamic-load-weight 0", {}),
    ("--dynamic-load-weight 1", "`start_server --reload MODEL` replaces the model of the running server"),
    ("--enable-expert-parallel", {"ENABLE_EXPERT_PARALLEL": "1"}),
    ("--enable-logprob", {}),
    ("--use-cudagraph --enable-prefix-caching --enable-chunked-prefill --tensor-parallel-size 2", {"MP_NUM": "2"}),
)
OF_PADDLENLP: tuple[tuple[str, Started | str], ...] = (
    ("MP_NUM=1 CUDA_VISIBLE_DEVICES=0", {"MP_NUM": "1"}),
    ("MP_NUM=2 CUDA_VISIBLE_DEVICES=0,1 DISABLE_STREAMING=1", {"MP_NUM": "2", "DISABLE_STREAMING": "1"}),
    (
        "HEALTH_HTTP_PORT=8110 SERVICE_GRPC_PORT=8811 METRICS_HTTP_PORT=8722 INTER_PROC_PORT=8813"
        " SERVICE_HTTP_PORT=9965 MAX_SEQ_LEN=8192 MAX_DEC_LEN=1024 BATCH_SIZE=48 BLOCK_BS=5 BLOCK_RATIO=0.75"
        " MAX_CACHED_TASK_NUM=128 PUSH_MODE_HTTP_WORKERS=1",
        {"BATCH_SIZE": "48", "BLOCK_BS": "5"},
    ),
    ("HTTP_PORT=8110 GRPC_PORT=8811 METRICS_PORT=8722 INTER_QUEUE_PORT=8813 PUSH_MODE_HTTP_PORT=9965", {}),
    (
        "POD_IPS=127.0.0.1,10.0.0.2 POD_0_IP=127.0.0.1 MP_NNODE=2 MP_NUM=16 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        {"MP_NNODE": "2", "MP_NUM": "16"},
    ),
    ("MODEL_PATH=/models MODEL_DIR=/models", {"MODEL_DIR": "/models"}),
    ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B/weight_only_int8", {}),
    ("deepseek-ai/DeepSeek-R1-2nodes/weight_only_int8", {}),
    ("model_name=deepseek-ai/DeepSeek-R1/weight_only_int4", {}),
    ("USE_WARMUP=0 USE_HF_TOKENIZER=0 USE_CACHE_KV_INT8=0 OUTPUT_LOG_TO_CONSOLE=0", {"USE_CACHE_KV_INT8": "0"}),
    ("USE_CACHE_KV_INT8=1 BLOCK_RATIO=0.25 BLOCK_BS=40 BATCH_SIZE=50", {"USE_CACHE_KV_INT8": "1"}),
)
SPLIT = (
    "CUDA_VISIBLE_DEVICES={} INFERENCE_MSG_QUEUE_ID={} FLAGS_max_partition_size=2048 FD_ATTENTION_BACKEND=FLASH_ATTN"
    " FD_LOG_DIR={} FD_USE_DEEP_GEMM=0 --model ./m --max-model-len 131072 --max-num-seqs 20 --quantization"
    " block_wise_fp8 --gpu-memory-utilization 0.9 --kv-cache-ratio {} --port {} --engine-worker-queue-port {}"
    " --metrics-port {} --tensor-parallel-size 4 --cache-queue-port {}"
)
OF_ERNIE: tuple[tuple[str, Started | str], ...] = (
    (
        "--model ./m --tensor-parallel-size 1 --quantization wint4 --max-model-len 32768 --kv-cache-ratio 0.75"
        " --max-num-seqs 128",
        {"MAX_MODEL_LEN": "32768", "BATCH_SIZE": "128", "QUANT_TYPE": "weight_only_int4", "BLOCK_RATIO": "0.75"},
    ),
    ("--tensor-parallel-size 2", {"MP_NUM": "2"}),
    ("--quantization block_wise_fp8", {"QUANT_TYPE": "block_wise_fp8"}),
    ("ENABLE_V1_KVCACHE_SCHEDULER=1", {}),
    ("--enable-prefix-caching --swap-space 50", {"ENABLE_PREFIX_CACHING": "1", "SWAP_SPACE": "50"}),
    ("--enable-chunked-prefill", {}),
    (
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "./mtp"}'""",
        {"SPECULATE_METHOD": "mtp", "SPECULATE_MAX_DRAFT_TOKEN_NUM": "1"},
    ),
    ("--use-cudagraph --tensor-parallel-size 1", {"USE_CUDAGRAPH": "1"}),
    ("FD_SAMPLING_CLASS=rejection", {}),
    (
        SPLIT.format("0,1,2,3", 1315, "prefill_log", "0.9", 7012, 7013, 7014, 7015)
        + " --num-gpu-blocks-override 40000 --splitwise-role prefill",
        {"SPLITWISE_ROLE": "prefill", "ENGINE_WORKER_QUEUE_PORT": "7013", "HEALTH_HTTP_PORT": "7015"},
    ),
    (
        SPLIT.format("4,5,6,7", 1215, "decode_log", "0.1", 9012, 8013, 8014, 8015)
        + " --innode-prefill-ports 7013 --splitwise-role decode",
        {"SPLITWISE_ROLE": "decode", "INNODE_PREFILL_PORTS": "7013", "FD_LOG_DIR": "decode_log"},
    ),
)
OF_PREFILL_GRAPHS: tuple[tuple[str, Started | str], ...] = (
    (
        """--graph-optimization-config '{"use_cudagraph":true, "cudagraph_only_prefill":true}'""",
        "cudagraph_only_prefill is not supported: decode steps are captured",
    ),
    ("""--graph-optimization-config '{"use_cudagraph":true, "full_cuda_graph":true}'""", {"USE_CUDAGRAPH": "1"}),
)
START_SERVERS = (
    "--model=./m --tensor-parallel-size=2 --max-model-len=4096 --max-num-seqs=256 --max-num-batched-tokens=4096"
    " --host=0.0.0.0 --port={} --served-model-name a-name"
)
INSTANCE = "GLOBAL_RANK_TABLE_FILE_PATH=global.json RANK_TABLE_FILE_PATH=local.json NODE_PORTS=8088,8089 USE_OPENAI=1 "
OF_RANK_TABLES: tuple[tuple[str, Started | str], ...] = (
    (
        "NODE_PORTS=8088,8089 USE_OPENAI=1 LLM_TOOLS_PATH=/tools " + START_SERVERS.format(9000),
        {"MAX_MODEL_LEN": "4096", "BATCH_SIZE": "256", "SERVED_MODEL_NAME": "a-name", "SERVICE_HOST": "0.0.0.0"},
    ),
    *((INSTANCE + START_SERVERS.format(port), "'global.json', which cannot be read") for port in (8088, 8089, 9000)),
    ("USE_OPENAI=0 NODE_PORTS=8088", {}),
    ("--quantization awq", {}),
    ("--quantization gptq", {}),
    ("--quantization smoothquant", "a8w8 has 8 bits a weight and an activation"),
    ("--mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server --save-dir ./s", OF_TOOL),
    ("--mode merge --global-ranktable-list ./a.json ./b.json --save-dir ./s", OF_TOOL),
)
STARTS = tuple(
    (document, typed, outcome)
    for document, starts in (
        (PARAMETERS, OF_PARAMETERS),
        (PADDLENLP, OF_PADDLENLP),
        (ERNIE, OF_ERNIE),
        (PREFILL_GRAPHS, OF_PREFILL_GRAPHS),
        (RANK_TABLES, OF_RANK_TABLES),
    )
    for typed, outcome in starts
)

# (document, a model, the checkpoint of the hub that stands for it, the QUANT_TYPE of its export)
_R1 = "deepseek-ai/DeepSeek-R1"
MODELS = (
    (PADDLENLP, f"{_R1}-Distill-Llama-8B/weight_only_int8", f"{_R1}-Distill-Llama-8B", "weight_only_int8"),
    *((PADDLENLP, f"{_R1}{mtp}/weight_only_int4", _R1, "weight_only_int4") for mtp in ("", "-MTP")),
    *(
        (PADDLENLP, f"{_R1}{mtp}-2nodes/{quant}", _R1, quant)
        for mtp in ("", "-MTP")
        for quant in ("a8w8_fp8", "weight_only_int8")
    ),
    *((PADDLENLP, f"{_R1}{mtp}/a8w8_fp8_wint4", _R1, "a8w8_fp8_wint4") for mtp in ("", "-MTP")),
    (ERNIE, "baidu/ERNIE-4.5-21B-A3B-Paddle", "baidu/ERNIE-4.5-21B-A3B-Paddle", "none"),
)

# (document, options of download_model.py, the error; empty: it is accepted)
DOWNLOADS = (
    (PADDLENLP, "--model_name deepseek-ai/DeepSeek-R1/weight_only_int4 --dir models --nnodes 1", ""),
    (PADDLENLP, "--model_name deepseek-ai/DeepSeek-R1-2nodes/weight_only_int8 --dir m --nnodes 2 --mode master", ""),
    (PADDLENLP, "--model_name deepseek-ai/DeepSeek-R1-2nodes/weight_only_int8 --dir m --nnodes 2 --mode slave", ""),
    (
        PADDLENLP,
        "--model_name deepseek-ai/DeepSeek-R1/a8w8_fp8 --dir m --nnodes 2 --mode master --speculate_model_path m",
        "speculate_model_path is for a mirror of static models (MODEL_MIRROR)",
    ),
)

# Commands of other programs: each begins like a row of docs/migrating.md that says what to type instead.
COMMANDS = (
    (PADDLENLP, "start_server"),
    (PADDLENLP, "start_server $model_name"),
    (PADDLENLP, "stop_server"),
    (PADDLENLP, "mpirun start_server"),
    (PADDLENLP, "mpirun stop_server"),
    (PADDLENLP, "python download_model.py --model_name"),
    (PADDLENLP, "python download_model.py --speculate_model_path"),
    (PADDLENLP, "docker run --gpus all --privileged --cap-add=SYS_PTRACE --network=host --shm-size=5G -v"),
    (PADDLENLP, "docker exec -it paddlenlp_serving /bin/bash"),
    (PADDLENLP, "docker run -v $MODEL_PATH:/models IMAGE /bin/bash -c -ex 'start_server $model_name && tail"),
    (PADDLENLP, "python /opt/output/download_model.py"),
    (PADDLENLP, "docker build -f ./dockerfiles/Dockerfile_serving_cuda124_cudnn9"),
    (PADDLENLP, "git clone https://github.com/PaddlePaddle/PaddleNLP.git"),
    (PADDLENLP, "nvidia-smi"),
    (PADDLENLP, "ls /models/"),
    (PARAMETERS, "@support_graph_optimization"),
    (PARAMETERS, "LLM(model=M, max_model_len=4096)"),
    (ERNIE, "python -m fastdeploy.entrypoints.openai.api_server"),
    (RANK_TABLES, "sh start_servers.sh"),
    (RANK_TABLES, "python pd_ranktable_tools.py --mode gen"),
    (RANK_TABLES, "python pd_ranktable_tools.py --mode merge"),
    (RANK_TABLES, "sh build_image.sh --base-image"),
    (RANK_TABLES, "unzip AscendCloud-"),
    (RANK_TABLES, "docker pull"),
    (RANK_TABLES, "docker run -itd --device=/dev/davinci4"),
    (RANK_TABLES, "docker exec -it -u ma-user"),
    (RANK_TABLES, "npu-smi info"),
    (RANK_TABLES, "docker -v"),
    (RANK_TABLES, "yum install -y docker-engine"),
    (RANK_TABLES, "sysctl -p"),
    (RANK_TABLES, "sed -i s/net.ipv4.ip_forward"),
    (RANK_TABLES, "df -h"),
    (RANK_TABLES, "docker images"),
    (RANK_TABLES, "curl http://"),
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONVERSATION = [
    {"role": "user", "content": "Hello, who are you"},
    {"role": "system", "content": "I'm a helpful AI assistant."},
    {"role": "user", "content": "List 3 countries and their capitals."},
]
KNIGHT = {
    "title": "Character",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "maxLength": 10, "type": "string"},
        "age": {"title": "Age", "type": "integer"},
        "armor": {"$ref": "#/definitions/Armor"},
        "weapon": {"$ref": "#/definitions/Weapon"},
        "strength": {"title": "Strength", "type": "integer"},
    },
    "required": ["name", "age", "armor", "weapon", "strength"],
    "definitions": {
        "Armor": {
            "title": "Armor",
            "description": "An enumeration.",
            "enum": ["leather", "chainmail", "plate"],
            "type": "string",
        },
        "Weapon": {
            "title": "Weapon",
            "description": "An enumeration.",
            "enum": ["sword", "axe", "mace", "spear", "bow", "crossbow"],
            "type": "string",
        },
    },
}
NATIVE = {"text": "Hello, how are you?", "req_id": "a"}
OPENAI = {"model": "default", "prompt": "hello"}
BEAMS = {"use_beam_search": True, "n": 2, "top_p": 1.0, "top_k": -1, "temperature": 0.0}

# (document, path, body, the error; empty: it is answered)
REQUESTS = (
    (PADDLENLP, CHAT, {**NATIVE, "max_dec_len": 64, "stream": True}, ""),
    (PADDLENLP, CHAT, {"messages": CONVERSATION, "req_id": "a", "max_dec_len": 64, "stream": True}, ""),
    (PADDLENLP, COMPLETIONS, {"model": "default", "prompt": "Hello, how are you?", "max_tokens": 50}, ""),
    (PADDLENLP, COMPLETIONS, {"model": "default", "prompt": "Hello!", "max_tokens": 100, "stream": True}, ""),
    (PADDLENLP, CHAT, {"model": "default", "messages": CONVERSATION, "temperature": 0, "max_tokens": 64}, ""),
    (PADDLENLP, CHAT, {"model": "default", "messages": CONVERSATION, "temperature": 0, "stream": True}, ""),
    *(
        (PADDLENLP, CHAT, {**NATIVE, **fields}, "")
        for fields in (
            {"max_dec_len": 1},
            {"min_dec_len": 1},
            {"topp": 0.7},
            {"topp": 1.0},
            {"temperature": 0.95},
            {"frequency_score": 0},
            {"penalty_score": 1},
            {"presence_score": 0},
            {"stream": False},
            {"timeout": 300},
            {"return_usage": False},
            {"return_usage": True},
        )
    ),
    (PADDLENLP, CHAT, {"req_id": "a"}, "text"),  # text and messages: one is needed
    (PADDLENLP, CHAT, {**NATIVE, "topp": 1.5}, "topp"),
    (PADDLENLP, CHAT, {**NATIVE, "min_dec_len": 0}, "min_dec_len"),
    (
        RANK_TABLES,
        CHAT,
        {
            "model": "default",
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 100,
            "top_k": -1,
            "top_p": 1,
            "temperature": 0,
            "ignore_eos": False,
            "stream": False,
        },
        "",
    ),
    (
        RANK_TABLES,
        COMPLETIONS,
        {**OPENAI, "max_tokens": 200, "temperature": 0, "guided_json": json.dumps(KNIGHT)},
        "",
    ),
    *(
        (RANK_TABLES, COMPLETIONS, {**OPENAI, **fields}, "")
        for fields in (
            {"max_tokens": 16},
            {"top_k": 5},
            {"top_p": 0.5},
            {"temperature": 1.0},
            {"stop": None},
            {"stop": "you"},
            {"stop": ["你", "好"]},
            {"stream": True},
            {"n": 10, "temperature": 0.5, "top_k": 5},
            BEAMS,
            {**BEAMS, "best_of": 2, "length_penalty": 1.0},
            {"presence_penalty": -2.0},
            {"frequency_penalty": 2.0},
            {"ignore_eos": True},
            {"guided_json": KNIGHT},
        )
    ),
    (RANK_TABLES, COMPLETIONS, {**OPENAI, "presence_penalty": 2.5}, "presence_penalty"),
    (RANK_TABLES, COMPLETIONS, {**OPENAI, "top_p": 0}, ""),
    (RANK_TABLES, COMPLETIONS, {**OPENAI, "use_beam_search": True, "n": 1}, ""),
)

# (document, files of a model's folder, the program of its rank, its tokenizer)
_AROUND = ("config.json", "special_tokens_map.json", "tokenizer_config.json", "rank_0/model.pdiparams")
LAYOUTS = (
    (PADDLENLP, (*_AROUND, "xxxx.model", "rank_0/model.json"), "rank_0/model.json", "xxxx.model"),
    (PADDLENLP, (*_AROUND, "xxxx.model", "rank_0/model.pdmodel"), "rank_0/model.pdmodel", "xxxx.model"),
)

# (document, the JSON of a file that a variable names, the variable, the error)
_DEVICES = [
    [{"device_id": f"{first + i}", "device_ip": f"10.0.0.{first + i}", "rank_id": f"{i}"} for i in (0, 1)]
    for first in (4, 6)
]
_SERVER = {"server_id": "localhost", "server_ip": "localhost"}
GLOBAL_TABLE = {
    "version": "1.0",
    "status": "completed",
    "server_group_list": [
        {"group_id": "0", "server_count": "1", "server_list": [_SERVER]},
        *(
            {"group_id": f"{group}", "server_count": "1", "server_list": [{**_SERVER, "device": devices}]}
            for group, devices in enumerate(_DEVICES, 1)
        ),
    ],
}
LOCAL_TABLE = {
    "version": "1.0",
    "status": "completed",
    "group_id": "0",
    "server_count": "1",
    "server_list": [{**_SERVER, "device": _DEVICES[1]}],
}
# What the documented tables come to at the decode instance, with NODE_PORTS=8088,8089
OF_TABLES: Started = {
    "SPLITWISE_ROLE": "decode",
    "SERVICE_HTTP_PORT": "8089",
    "PREFILL_INSTANCES": "localhost:8488",
    "REPLICAS": "localhost:8189",
    "SERVICE_GRPC_PORT": "8189",
    "MP_NUM": "2",
    "CUDA_VISIBLE_DEVICES": "6,7",
}

# (document, port, path of a GET)
ADDRESSES = (
    (PADDLENLP, "health", "/v2/health/live"),
    (PADDLENLP, "health", "/v2/health/ready"),
)
