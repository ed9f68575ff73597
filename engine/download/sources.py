"""Sources of models: the Hugging Face hub, or a mirror of static models. It lists files and fetches none."""

from __future__ import annotations

import logging
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import quote

from engine.download.files import Denied, DownloadError, Listing, RemoteFile, Temporary, check_path
from engine.download.transfer import Policy, Stop, get_text, http_error, one_line, with_retries

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

log = logging.getLogger(__name__)

# Of a hub repository the export reads these, at its top level: no other framework's or format's weights.
NEEDED = (
    "config.json generation_config.json *.safetensors *.safetensors.index.json chat_template.* "
    "tokenizer*.json *.model *.tiktoken vocab.* merges.txt added_tokens.json special_tokens_map.json "
    "preprocessor_config.json processor_config.json hf_quant_config.json"
).split()
IN_PADDLE = ("model_state*.pdparams", "model_state.pdparams.index.json")  # where there is no safetensors file
UNNEEDED = ("consolidated*",)  # the same weights once more, in the layout of their authors

# A static model's name may end in how it was exported, which says nothing about the checkpoint.
EXPORT_SUFFIX = re.compile(r"(-(Block-Attn|Append-Attn|MTP|2nodes))+$")


def list_mirror(folder_url: str, policy: Policy, stop: Stop) -> Listing:
    """Return the files of one folder, as `file_list.txt` lists them: one `relative/path:md5` a line."""
    list_url = f"{folder_url}/file_list.txt"
    try:
        text = get_text(list_url, policy, stop)
    except DownloadError as error:
        raise type(error)(f"{list_url}: {error}") from None
    files: dict[str, RemoteFile] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        path, _, md5 = line.rpartition(":")
        if not re.fullmatch("[0-9a-fA-F]{32}", md5):
            raise DownloadError(f"{list_url}: expected `path:md5`, got {line[:80]!r}")
        file = RemoteFile(check_path(path), f"{folder_url}/{quote(path)}", f"md5:{md5.lower()}")
        if files.setdefault(path, file) != file:
            raise DownloadError(f"{list_url}: {path} is listed with two different md5")
    if not files:
        raise DownloadError(f"{list_url}: lists no files")
    return Listing(list(files.values()))


def list_hub(repo_id: str, endpoint: str | None, policy: Policy, stop: Stop) -> Listing:
    """Return the needed files of the newest commit, pinned to it: config.json first, then by increasing size."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise Temporary(f"{repo_id}: HF_HUB_OFFLINE forbids asking the hub")
    info = _find_repo(repo_id, endpoint, policy, stop)
    where = f"{info.id} on {endpoint or constants.ENDPOINT}"
    files, siblings = [], info.siblings or []
    has_safetensors = any(fnmatchcase(each.rfilename, "*.safetensors") for each in siblings)
    needed = NEEDED if has_safetensors else (*NEEDED, *IN_PADDLE)
    for sibling in siblings:
        path = sibling.rfilename
        if any(fnmatchcase(path, name) for name in UNNEEDED) or "/" in path:
            continue
        if any(fnmatchcase(path, name) for name in needed):
            url = hf_hub_url(info.id, check_path(path), revision=info.sha, endpoint=endpoint)
            files.append(RemoteFile(path, url, _digest(sibling, where), sibling.size))
    paths = {file.path for file in files}
    if "config.json" not in paths:
        raise DownloadError(f"{where}: no config.json, this is not a model that can be exported")
    if not any(path.endswith((".safetensors", ".pdparams")) for path in paths):
        convert = "`from_pretrained` and `save_pretrained` of transformers convert a checkpoint that you trust"
        raise DownloadError(f"{where}: no safetensors weights, and other formats are not read; {convert}")
    authorization = build_hf_headers().get("authorization")
    return Listing(sorted(files, key=lambda file: (file.path != "config.json", file.size)), info.sha, authorization)


def _find_repo(repo_id: str, endpoint: str | None, policy: Policy, stop: Stop) -> ModelInfo:
    try:
        return with_retries(lambda: _model_info(repo_id, endpoint, policy), policy, stop)
    except NotFound:
        checkpoint = EXPORT_SUFFIX.sub("", repo_id)
        if checkpoint == repo_id:
            raise
        log.info("%s is not on the hub, trying the checkpoint it is made from: %s", repo_id, checkpoint)
        return with_retries(lambda: _model_info(checkpoint, endpoint, policy), policy, stop)


class NotFound(DownloadError):
    pass


def _model_info(repo_id: str, endpoint: str | None, policy: Policy) -> ModelInfo:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    where = f"{repo_id} on {endpoint or constants.ENDPOINT}"
    try:
        return HfApi(endpoint=endpoint).model_info(repo_id, files_metadata=True, timeout=policy.timeout_s)
    except GatedRepoError:
        raise Denied(f"{where}: access is granted on request only, ask there") from None
    except RepositoryNotFoundError:
        raise NotFound(f"{where}: no such model, or a private one and HF_TOKEN does not open it") from None
    except HfHubHTTPError as error:
        status, headers = error.response.status_code, error.response.headers
        said = one_line(headers.get("X-Error-Message", ""))
        raise http_error(status, f"{where}: HTTP {status} {said}".strip(), headers) from None
    except ValueError as error:  # a name the library refuses, an answer that is not JSON
        raise DownloadError(f"{where}: {str(error).partition(chr(10))[0]}") from None
    except Exception as error:  # the library's transport differs between its versions, and so do its errors
        raise Temporary(f"{where}: {str(error) or type(error).__name__}") from None


def _digest(sibling: RepoSibling, where: str) -> str:
    """Return the sha256 of a large file, or Git's SHA-1 of a small one, with the name of the hash."""
    if sibling.size is not None and sibling.lfs is not None:
        return f"sha256:{sibling.lfs.sha256}"
    if sibling.size is not None and sibling.blob_id:
        return f"git-sha1:{sibling.blob_id}"
    raise DownloadError(f"{where}: no size and checksum for {sibling.rfilename}, it could not be verified")
