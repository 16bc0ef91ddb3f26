"""What tests of verbs that look at a run share: the command line, and models without a run."""

from towers import cli
from towers.options.run import Options
from towers.training.loading import Trained


def command(capsys, *argv):
    """Return the exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    code = cli.main([str(word) for word in argv])
    return code, *capsys.readouterr()


def as_trained(model, *spec, **task):
    """Return a model as if it were that of a run on such examples."""
    about = dict(num_classes=0, class_names=[], image_shape=None, augment="off", spec=list(spec))
    return Trained(Options(batch_size=4, num_towers=2), about | task, model, 5, False)
