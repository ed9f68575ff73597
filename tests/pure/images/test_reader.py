"""Images of requests are read from data URLs or by download, within the limits of the server."""

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.images.processor import ImageError
from engine.images.reader import ImageReader
from engine.settings.config import Config
from engine.wire import ImagePart
from tests.checkpoints import make_checkpoint
from tests.image_requests import a_data_url, a_file, a_reader, write_vision_model
from tests.images import an_image

FILE = a_file(an_image(60, 90))


class FakeDownloader:
    def __init__(self):
        self.urls = []

    def fetch(self, url):
        self.urls.append(url)
        if "gone" in url:
            raise ImageError("could not be downloaded: the status is 404")
        return FILE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_vision_model(directory)
    return directory


@pytest.fixture(scope="module")
def reader(model):
    reader = a_reader(model, FakeDownloader())
    yield reader
    reader.close()


def read(reader, url, detail="auto", **limits):
    return reader.read(ImagePart(url, "[3].content[1].image_url", detail), reader.limits_of(limits))


def refusal(reader, url, **limits):
    with pytest.raises(InvalidRequest) as caught:
        read(reader, url, **limits)
    return caught.value


@pytest.mark.parametrize(
    "head", ["data:image/png;base64,", "DATA:image/PNG;charset=x;Base64,", "data:image/jpeg;base64,"]
)
def test_a_data_url_is_read_and_its_format_is_that_of_the_file(reader, head):
    image = read(reader, head + a_data_url(FILE).partition(",")[2])
    assert image.pixels == reader.processor.resize(an_image(60, 90)).tobytes()


def test_a_data_url_may_be_percent_encoded(reader):
    url = "data:image/png," + "".join(f"%{byte:02x}" for byte in FILE)
    assert read(reader, url) == read(reader, a_data_url(FILE))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:", "is no data URL"),
        ("data:image/png;base64", "is no data URL"),
        ("data:text/plain;base64,aGk=", "is a data URL of another type than image/..."),
        (f"data:;base64,{a_data_url(FILE).partition(',')[2]}", "is a data URL of another type"),
        ("data:image/png;base64,a", "is a data URL with invalid base64"),
        ("data:image/png;base64,aGk=\n", "is a data URL with invalid base64"),
        ("data:image/png;base64,aGk=", "is no image in a supported format"),
        ("data:image/png;base64,", "is no image in a supported format"),
        (a_data_url(FILE[:100]), "is no valid PNG file"),
        ("http://cat.example/gone", "could not be downloaded: the status is 404"),
    ],
)
def test_a_refusal_names_the_part(reader, url, message):
    error = refusal(reader, url)
    assert str(error).startswith(f"The `messages[3].content[1].image_url` {message}")
    assert error.field == "messages"
    assert error.message({"messages": "input"}).startswith("The `input[3].content[1].image_url`")


def test_an_image_is_downloaded_only_where_a_setting_allows_it(reader, model):
    assert read(reader, "https://cat.example/a.png") == read(reader, a_data_url(FILE))
    offline = a_reader(model)
    assert "ALLOWED_MEDIA_DOMAINS" in str(refusal(offline, "https://cat.example/a.png"))


def test_an_image_that_was_read_before_is_not_decoded_again(reader, monkeypatch):
    first = read(reader, a_data_url(FILE))
    monkeypatch.setattr(reader, "_pool", None)
    assert read(reader, a_data_url(FILE)) is first
    with pytest.raises(AttributeError):  # with other limits it is another one
        read(reader, a_data_url(FILE), max_pixels=784)


def test_prepared_images_are_forgotten_beyond_a_limit_of_bytes(model, monkeypatch):
    monkeypatch.setattr("engine.images.reader.CACHE_BYTES", 3 * 784 * 3 * 2)
    reader = a_reader(model)
    files = [a_data_url(a_file(an_image(28, 84, seed))) for seed in range(3)]
    first, second, _ = [read(reader, url) for url in files]
    assert read(reader, files[1]) is second
    assert read(reader, files[0]) is not first
    assert reader._num_cached_bytes == 3 * 784 * 3 * 2
    reader.close()


def test_a_request_may_make_images_smaller_but_not_larger_than_the_server_does(reader):
    large = a_data_url(a_file(an_image(300, 300)))
    assert read(reader, large).num_tokens == 9
    assert read(reader, large, max_pixels=784 * 5).num_tokens == 4
    error = refusal(reader, large, max_pixels=784 * 13)
    assert str(error) == "The `mm_processor_kwargs.max_pixels` is 10192, the limit of this server is 9408"
    assert "cannot be kept" in str(refusal(reader, large, min_pixels=784 * 3, max_pixels=784 * 2))
    assert "cannot be kept" in str(refusal(reader, large, max_pixels=783))
    small = a_data_url(a_file(an_image(28, 28)))
    assert (read(reader, small).num_tokens, read(reader, small, min_pixels=784 * 4).num_tokens) == (1, 4)


@pytest.mark.slow
def test_low_detail_is_a_limit_of_pixels(tmp_path):
    write_vision_model(tmp_path, max_pixels=1024 * 1024)
    reader = a_reader(tmp_path)
    large = a_data_url(a_file(an_image(1000, 1000)))
    high, low = (read(reader, large, detail) for detail in ("high", "low"))
    assert low.num_tokens * 784 <= 512 * 512 < high.num_tokens * 784
    reader.close()


def test_the_settings_apply_to_the_model(model, tmp_path):
    config = Config().changed(mm_processor_kwargs='{"max_pixels": 2000, "fps": 2}')
    reader = ImageReader.load(config, model)
    assert (reader.processor.min_pixels, reader.processor.max_pixels) == (784, 2000)
    assert ImageReader.load(Config(enable_mm=False), model) is None
    assert ImageReader.load(Config(), make_checkpoint(tmp_path / "text", "qwen2", seed=0)) is None


def test_the_pixels_are_those_of_the_file_not_of_a_preview(reader):
    image = read(reader, a_data_url(a_file(an_image(28, 56))))
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(28, 56, 3)
    assert np.array_equal(pixels, np.asarray(an_image(28, 56)))
