"""The ConfigProto that the options mean, on made-up machines; test_guides.py runs sessions."""

import os

import pytest

from tests import fake_gpus
from tests.fake_gpus import A100
from towers.devices import config_proto
from towers.errors import InputError


@pytest.fixture
def four(monkeypatch):
    return fake_gpus.install(monkeypatch, A100, A100, A100, A100)


def limits(config):
    virtual = config.gpu_options.experimental.virtual_devices
    return [list(gpu.memory_limit_mb) for gpu in virtual]


def test_by_default_all_is_as_tensorflow_has_it(four):
    config = config_proto()
    assert config.allow_soft_placement
    assert not config.log_device_placement
    assert dict(config.device_count) == {"CPU": 1}
    assert config.gpu_options.visible_device_list == ""
    assert config.gpu_options.per_process_gpu_memory_fraction == 0
    assert not config.gpu_options.allow_growth
    assert limits(config) == []


def test_each_option_has_its_field(four):
    config = config_proto(allow_soft_placement=False, log_device_placement=True, num_cpus=3)
    assert not config.allow_soft_placement
    assert config.log_device_placement
    assert dict(config.device_count) == {"CPU": 3}


def test_a_limit_is_for_each_gpu_that_the_session_sees(four, monkeypatch):
    assert limits(config_proto(gpu_memory_limit_mib=512)) == [[512]] * 4
    assert limits(config_proto(gpu_memory_limit_mib=512, visible_gpus="1,3")) == [[512]] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert limits(config_proto(gpu_memory_limit_mib=512)) == [[512]] * 3


def test_visible_gpus_are_places_among_those_that_cuda_shows(four, monkeypatch):
    config = config_proto(visible_gpus="0,2")
    assert config.gpu_options.visible_device_list == "0,2"
    assert config.device_count["GPU"] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2,0")
    assert config_proto(visible_gpus="0,2").gpu_options.visible_device_list == "2,1"
    with pytest.raises(InputError, match="GPU 1 is hidden by CUDA_VISIBLE_DEVICES=3,2,0,"):
        config_proto(visible_gpus="1")


def test_no_gpu(four):
    config = config_proto(visible_gpus="none")
    assert dict(config.device_count) == {"CPU": 1, "GPU": 0}
    assert config.gpu_options.visible_device_list == ""


def test_cuda_reads_what_the_options_were_checked_against(four, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", '"1,2"')
    assert config_proto(visible_gpus="2").gpu_options.visible_device_list == "1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_without_a_driver(monkeypatch):
    fake_gpus.install(monkeypatch, driver=False)
    assert limits(config_proto(gpu_memory_limit_mib=512)) == [[512]]
    assert config_proto(per_process_gpu_memory_fraction=0.4, visible_gpus="none")
    with pytest.raises(InputError, match="no NVIDIA driver answers here"):
        config_proto(visible_gpus="0")
