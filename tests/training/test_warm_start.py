"""`--init_from`: what a new run begins with, and what it says of that."""

import os
import re
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras.src.legacy.saving import legacy_h5_format

from tests import tiny
from tests.runs import command, rare, refusal
from towers.errors import InputError
from towers.training.run import manifest, warm_start
from towers.training.run.setup import prepare
from towers.training.run.warm_start import init_from
from towers.training.train import train

pytestmark = pytest.mark.graph
layers = keras.layers


def classifier(num_classes, image_shape, width=4, stem="stem", norm="norm", head="head"):
    """`tests.tiny:cnn` with names of its own and a frozen layer; draws have a seed."""
    first = [layers.Conv2D(width, 3, name=stem), layers.BatchNormalization(name=norm)]
    first[0].trainable = False
    last = [layers.GlobalAveragePooling2D(), layers.Dense(num_classes, name=head)]
    return keras.Sequential([keras.Input(image_shape), *first, layers.Dropout(0.1), *last])


def backbone():
    inputs = keras.Input((None, None, 3))
    x = layers.DepthwiseConv2D(3, name="depthwise")(layers.Conv2D(5, 1, name="expand")(inputs))
    return keras.Model(inputs, layers.BatchNormalization(name="normal")(x), name="body")


def upon_backbone(num_classes, image_shape):
    """A frozen backbone below another head, after a layer that takes the first one's place."""
    body = backbone()
    body.trainable = False
    last = [layers.GlobalAveragePooling2D(), layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), layers.Conv2D(3, 1), body, *last])


def begun(source, model="classifier", **flags):
    """Return the lines about the first weights, and {path: value} of a model that has them."""
    run = prepare(tiny.options("unused", model=f"{__name__}:{model}", **flags))
    lines = init_from(run.train_state, str(source))
    found = {weight.path: weight.numpy() for weight in run.train_state.model.weights}
    return [line.replace(str(source), "SOURCE") for line in lines], found


def with_other_weights(model):
    """Let no weight be as it is in a new model."""
    random = np.random.default_rng(5)
    for weight in model.weights:
        weight.assign(random.normal(size=weight.shape))
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model, and the folder with its weights in files."""
    folder, model = tmp_path_factory.mktemp("source"), classifier(3, (8, 8, 3))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)  # slots are in the file, too
    with_other_weights(model).save(folder / "file.keras")
    model.save_weights(folder / "file.weights.h5")
    return folder, model


@pytest.mark.run
def test_a_run_gives_its_averages(trained, tmp_path, capsys):
    source, flags = trained("classes"), ("--model=tests.tiny:cnn", "--model_args=width=3")
    flags = *flags, "--dataset=tests.tiny:images", "--augment=none", "--batch_size=7"
    flags = *flags, f"--init_from={source}", "--ema_decay=0.9", "--num_towers=2", "--max_steps=1"
    code, out, _ = command(capsys, "train", *flags, f"--train_dir={tmp_path}")
    assert code == 0
    assert f"init_from   {source}, its averages at step 18: 8 of 8 weights\n" in out
    there, here = tiny.saved(source), tiny.saved(tmp_path, 0)
    for name in (name for name in here if name.startswith(("model.S", "average.S"))):
        seed = "seed_generator" in name  # the draws are those of the new run
        expected = here if seed else there
        of_run = f"average.S{name.partition('.S')[2]}"
        np.testing.assert_array_equal(here[name], expected[name if seed else of_run], name)
    found = manifest.read(tmp_path)
    assert found["flags"]["init_from"] == str(source)
    assert found["initial_weights"] != manifest.read(source)["initial_weights"]


@pytest.mark.process
@pytest.mark.parametrize("file", ["file.keras", "file.weights.h5"])
def test_a_file_of_keras(source, file):
    folder, model = source
    lines, found = begun(folder / file, variables="replicated", num_towers=2)
    assert lines == ["init_from   SOURCE: 8 of 8 weights"]
    for weight in model.weights:  # of the second model of this process, perhaps
        path = "/".join(["sequential", *weight.path.split("/")[1:]])
        np.testing.assert_array_equal(found[path], weight.numpy(), path)


@pytest.mark.run
def test_another_head_and_another_width_are_said(trained):
    names = "stem=conv2d,norm=batch_normalization"
    lines, _ = begun(trained("classes"), model_args=f"width=3,head=other,{names}")
    assert lines == [
        "init_from   SOURCE, its averages at step 18: 6 of 8 weights",
        "  not there (2): sequential/other/kernel, sequential/other/bias",
        "  of no use here (2): sequential/dense/bias, sequential/dense/kernel",
    ]
    lines, _ = begun(trained("classes"), model_args=f"width=5,head=dense,{names}")
    assert lines[0].endswith(": 1 of 8 weights")
    shapes = "sequential/conv2d/kernel [3, 3, 3, 5] here, [3, 3, 3, 3] there"
    assert lines[1].startswith(f"  of another shape (7): {shapes}")


@pytest.mark.process
@pytest.mark.parametrize("file", ["keras_2.h5", "body.weights.h5"])
def test_weights_also_in_the_layout_of_keras_2_go_into_a_backbone(tmp_path, file):
    body = with_other_weights(backbone())
    if file == "keras_2.h5":
        with h5py.File(tmp_path / file, "w") as opened:
            legacy_h5_format.save_weights_to_hdf5_group(opened, body)
    else:
        body.save_weights(tmp_path / file)
    lines, found = begun(tmp_path / file, "upon_backbone")
    num = len(body.weights)
    assert lines[0] == f"init_from   SOURCE: {num} of {num + 4} weights"
    new = [f"sequential/{n}/{part}" for n in ("conv2d", "dense") for part in ("kernel", "bias")]
    assert lines[1:] == [f"  not there (4): {', '.join(new)}"]
    for weight in body.weights:
        np.testing.assert_array_equal(found[weight.path], weight.numpy(), weight.path)


@pytest.mark.process
def test_no_code_in_a_file_runs(tmp_path):
    model = keras.Sequential([keras.Input((8, 8, 3)), layers.Flatten(), layers.Dense(5)])
    called, name = tmp_path / "called", str(tmp_path / "called")
    model.add(layers.Lambda(lambda x: (open(name, "a").close(), x)[1]))
    for file in "a.keras", "a.h5", "a.weights.h5":
        (model.save_weights if "weights" in file else model.save)(tmp_path / file)
        called.unlink(missing_ok=True)
        with pytest.raises(InputError, match="has no weight of this model"):
            begun(tmp_path / file)
        assert not called.exists()


AT = "layers/scale/vars/0"
NO_WEIGHTS = "is no file of Keras' weights"


def put(value, at=AT):
    return lambda file: file.__setitem__(at, value)


def made(*shape_and_type, **given):
    return lambda file: file.create_dataset(AT, *shape_and_type, **given)


def of_other_files(file):
    layout = h5py.VirtualLayout((2,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "secret", (2,))
    file.create_virtual_dataset(AT, layout)


def legacy(*names, secret=None):
    def write(file):
        file.attrs["layer_names"] = np.array([b"dense"])
        file.create_group("dense").attrs["weight_names"] = np.array(names)
        if secret:
            file["dense/secret"] = secret

    return write


HOSTILE = {
    "texts": (put(["a", "b"]), NO_WEIGHTS),
    "fields": (put(np.zeros(2, [("a", "f4"), ("b", "f4")])), "vars/0 is .* weights are numbers"),
    "complex": (put(np.zeros(2, np.complex64)), "complex64, and weights are numbers"),
    "compressed": (made(data=np.zeros(2, "f4"), compression="gzip"), "save them with it"),
    "a piece of 2 GB": (
        made((2,), "f4", maxshape=(None,), chunks=(2**29,), compression="gzip"),
        "save them with it",
    ),
    "elsewhere": (made((2,), "f4", external=[("/etc/passwd", 0, 8)]), "in another file"),
    "of other files": (of_other_files, "in another file"),
    "link": (put(h5py.ExternalLink("other.h5", "secret")), "vars/0 is a link"),
    "group": (put(h5py.ExternalLink("other.h5", "/"), "layers/scale"), "layers/scale is a link"),
    "circle": (put(h5py.SoftLink(f"/{AT}")), "vars/0 is a link"),
    "legacy link": (
        legacy(b"secret", secret=h5py.ExternalLink("other.h5", "secret")),
        "dense/secret is a link",
    ),
    "no array": (put(h5py.Empty("f4")), "is no array"),
    "names of nothing": (legacy(b"there", b"is", b"none"), NO_WEIGHTS),
    "huge": (made((2**40,), "f8"), "has no weight of this model"),
}


@pytest.mark.process
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_keras_does_not_write_is_refused(train_state, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with h5py.File("other.h5", "w") as other:
        other["secret"] = other["vars/0"] = np.ones(2, "f4")
    write, line = HOSTILE[kind]
    with h5py.File("hostile.h5", "w") as file:
        write(file)
    said = refusal(init_from, train_state, "hostile.h5")
    assert re.search(f"--init_from=hostile.h5.*{line}", said)


@pytest.fixture(scope="module")
def train_state():
    """A model with a weight of `[2]` at layers/scale/vars/0, called dense/secret."""
    return prepare(tiny.options("unused", model=f"{__name__}:one_vector")).train_state


class Scale(layers.Layer):
    def build(self, shape):
        self.secret = self.add_weight(shape=(2,), name="secret")

    def call(self, x):
        return self.secret * x


def one_vector(num_classes, image_shape):
    first = [keras.Input(image_shape), layers.GlobalAveragePooling2D(), layers.Dense(2, name="a")]
    return keras.Sequential([*first, Scale(name="dense"), layers.Dense(num_classes, name="b")])


def packed(how, content, into):
    with zipfile.ZipFile(into, "w", how) as archive:
        archive.writestr("model.weights.h5", content)


def encrypted(content, into):
    packed(zipfile.ZIP_STORED, content, into)
    marked = bytearray(into.read_bytes())
    marked[6] |= 1
    marked[marked.index(b"PK\1\2") + 8] |= 1
    into.write_bytes(marked)


@pytest.mark.process
@pytest.mark.parametrize(
    ("pack", "line"),
    [
        (encrypted, "encrypted"),
        (lambda _, into: packed(zipfile.ZIP_DEFLATED, bytes(2**27), into), "unpacks to 128.0 MiB"),
        (lambda content, into: packed(zipfile.ZIP_BZIP2, content, into), "packed in a way"),
        (lambda content, into: packed(zipfile.ZIP_LZMA, content, into), "packed in a way"),
        (lambda content, into: packed(0, content[:-9000], into), NO_WEIGHTS),
        (lambda content, into: packed(0, b"", into), NO_WEIGHTS),
        (lambda content, into: into.write_bytes(content[:100]), NO_WEIGHTS),
        (lambda content, into: os.mkfifo(into), "pipe or a device"),
        (lambda content, into: into.symlink_to("/dev/zero"), "pipe or a device"),
    ],
    ids=["encrypted", "bomb", "bz2", "lzma", "cut", "empty", "short", "pipe", "device"],
)
def test_a_file_that_is_none(train_state, source, tmp_path, pack, line):
    path = tmp_path / "mine.keras"
    pack((source[0] / "file.weights.h5").read_bytes(), path)
    assert line in refusal(init_from, train_state, str(path))


@pytest.mark.process
@pytest.mark.parametrize("file", ["file.weights.h5", rare("file.keras")])
def test_a_file_over_which_hdf5_goes_in_circles(source, tmp_path, monkeypatch, file):
    """Of the collection of texts: an object of no bytes, after which it looks for the next."""
    monkeypatch.setattr(warm_start, "_SECONDS", 1.0)
    content = bytearray((source[0] / "file.weights.h5").read_bytes())
    place = content.index(b"GCOL")
    content[place + 16] = 0
    content[place + 24 : place + 32] = bytes(8)
    path = tmp_path / file
    path.write_bytes(content)
    if file == "file.keras":
        packed(0, bytes(content), path)
    with pytest.raises(InputError, match="HDF5 reads for longer than 1 s"):
        begun(path)


@pytest.mark.process
def test_weights_in_bfloat16(tmp_path):
    last = layers.Dense(2, dtype="bfloat16")
    model = with_other_weights(keras.Sequential([keras.Input((3,)), last]))
    model.save_weights(tmp_path / "half.weights.h5")
    with warm_start._of_file(tmp_path / "half.weights.h5") as found:
        kernel, bias = (warm_start._array(each.value) for each in found)
    np.testing.assert_array_equal(kernel, model.weights[0].numpy())


@pytest.mark.process
def test_a_run_goes_on_without_its_source(source, tmp_path, capsys):
    file = tmp_path / "gone.keras"
    file.write_bytes((source[0] / "file.keras").read_bytes())
    folder, flags = tmp_path / "run", dict(ema_decay=0.9, num_epochs=2.0, init_from=str(file))
    given = dict(model=f"{__name__}:classifier", **flags)
    whole = tiny.Loop(tiny.options("unused", **given))
    init_from(whole.train_state, str(file))
    whole(6)
    train(tiny.options(folder, **given, max_steps=3))
    file.unlink()
    code, out, _ = command(capsys, "train", f"--flagfile={folder}/flags.cfg", "--max_steps=6")
    assert code == 0 and f"has its own weights: {file} is not read" in out
    state = {name.replace("/", ".S"): value for name, value in whole.state().items()}
    tiny.assert_identical(tiny.saved(folder), state)


REFUSED = {
    "none.keras": "--init_from=SOURCE: there is no such file or folder",
    "notes.h5": "--init_from=SOURCE is no file of Keras' weights (.keras, .weights.h5, .h5): ",
    "empty": "--init_from=SOURCE: there is no run; name the folder of a run, or a file that",
    "other.keras": "--init_from=SOURCE has no weight of this model: layers/layer_normalization/va",
}


@pytest.mark.process
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_one_line(tmp_path, capsys, name):
    (tmp_path / "notes.h5").write_text("no weights")
    (tmp_path / "empty").mkdir()
    other = keras.Sequential([keras.Input([2]), layers.LayerNormalization(name="x")])
    other.save(tmp_path / "other.keras")
    flags = f"--model={__name__}:classifier", "--dataset=tests.tiny:images", "--augment=none"
    flags = *flags, f"--init_from={tmp_path / name}", f"--train_dir={tmp_path}/a"
    code, _, err = command(capsys, "train", *flags)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("towers: " + REFUSED[name].replace("SOURCE", str(tmp_path / name)))
    assert not (tmp_path / "a").exists()
