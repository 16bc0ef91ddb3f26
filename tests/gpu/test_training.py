"""`towers train` over two GPUs, and what follows on it."""

import pytest

from tests.runs import command

pytestmark = pytest.mark.run
IMAGES = "--dataset=tests.tiny:images --augment=none"
WORDS = "--dataset=tests.user_models:text"
FAMILIES = {
    "resnet": f"--model=models.resnet:resnet20 {IMAGES} --augment=resnet --weight_decay=1e-4",
    "lrn": f"--model=models.cnn:cnn {IMAGES} --augment=tutorial --ema_decay=0.9",
    "dense": f"--model=tests.tiny:dense {IMAGES} --clip_global_norm=1",
    "dropout": f"--model=tests.tiny:cnn {IMAGES} --augment=resnet",
    "float16": f"--model=tests.tiny:cnn {IMAGES} --dtype=mixed_float16",
    "bfloat16": f"--model=tests.tiny:cnn {IMAGES} --dtype=mixed_bfloat16",
    "transformer": f"--model=tests.user_models:transformer {WORDS} --optimizer=adamw",
    "vit": f"--model=models.vit:vit {IMAGES} ",
    "muon": f"--model=models.fast:fast --model_args=small_size=0 {IMAGES} --augment=shift --dtype=mixed_bfloat16 --optimizer=muon --test_time_flip=true",
}


@pytest.mark.parametrize("variables", ["cpu", "sharded", "replicated"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_op_of_a_tower_is_on_its_gpu(name, variables, tmp_path, capsys):
    flags = f"{FAMILIES[name]} --variables={variables} --batch_size=8 --max_steps=3"
    code, out, err = command(
        capsys, "train", f"--train_dir={tmp_path}/run", "--placement=strict", *flags.split()
    )
    print(out[-3000:], err)
    assert code == 0, err
    assert "/gpu:0, /gpu:1" in out
