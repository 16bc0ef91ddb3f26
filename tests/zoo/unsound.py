"""The table of models that differ, each with the cause that verify must name, or are refused."""

from tests.zoo.entry import REFUSED, SAME, Entry

LOCAL, IN_PARTS = "--batch_norm=local", "--accumulate_steps=2"


def _refused(**whys: str) -> list[Entry]:
    return [Entry(f"refused:{name}", REFUSED, why) for name, why in whys.items()]


def _fault(cause: str, module: str, **whys: str) -> list[Entry]:
    return [Entry(f"{module}:{name}", cause, why) for name, why in whys.items()]


UNSOUND = [
    Entry("convolutions:first_cnn", "local BatchNorm", "moments of a slice", LOCAL),
    Entry("norms:batch_norm_ranks", "local BatchNorm", "moments of a slice", LOCAL),
    Entry("norms:batch_norm_twice", SAME, "moments of a half, on one device, too", IN_PARTS),
    Entry("convolutions:dense_block", SAME, "moments of a half, on one device, too", IN_PARTS),
    *_fault(
        "state",
        "state",
        last_example="one tower alone has it",
        product="factors are neither added nor averaged",
        moving_variance="a variance is not the mean of variances",
        memory_bank="a queue takes from the first tower alone",
        root_mean_square="a root is not the mean of roots",
        codebook="each code's mean has a number of its own",
    ),
    *_fault(
        "mixed examples",
        "mixing",
        minus_mean="the batch's mean",
        batch_softmax="softmax along the batch",
        running_sum="cumsum along the batch",
        rolled="takes from its neighbour",
        reversed_batch="the last meets the first",
        sorted_batch="places change",
        whole_norm="a norm without an axis",
        by_largest="the largest of all examples",
        first_as_reference="all look at the first",
        own_batch_norm="moments by tf.nn.moments",
        ghost_batch_norm="moments of halves",
        pairwise="similarity of all pairs",
        discrimination="distances of all pairs",
        attention_over_the_batch="attention along the batch",
        shuffled="keras.random.shuffle",
        manifold_mixup="mixes an example with another",
        keras_mix_up="Keras' layer mixes images",
        keras_equalization="Keras' layer makes one histogram of all images",
        keras_cut_mix="Keras' layer cuts and pastes between images",
        until_all_are_done="the slowest decides when the loop ends",
        experts_with_capacity="who is first takes the room",
        hard_examples="the median decides whose gradient counts",
    ),
    *_fault(
        "place in the batch",
        "mixing",
        place_as_feature="a tower counts from the first of its slice",
        draws_one_by_one="seeds begin again in each tower",
    ),
    *_fault(
        "batch size",
        "mixing",
        divided_by_number="a sum where a mean is meant",
        times_root_of_number="grows with the slice",
        size_as_feature="the slice's size enters",
        mean_gradient="the gradient alone is divided",
    ),
    *_fault(
        "random op",
        "faults",
        tensorflow_normal="a generator with state of its own",
        tensorflow_uniform="a seed does not help",
        tensorflow_dropout="tf.nn.dropout draws so",
        tensorflow_flip="tf.image.random_* draw so",
        tensorflow_generator="tf.random.Generator",
        gamma_draw="how many numbers it takes is not known before",
        beta_draw="made of gammas",
        binomial_draw="how many numbers it takes is not known before",
        categorical_draw="rows begin at the slice's start",
    ),
    *_fault(
        "python code",
        "faults",
        noise_by_numpy_function="draws while it runs",
        dropout_by_py_function="draws while it runs",
        counter_by_numpy_function="counts while it runs",
    ),
    *_fault(
        "ambiguous draw",
        "faults",
        square_draw="[B, B]",
        one_row_less_than_twice="[2 * B - 1, C]",
        noise_where_positive="as many as are positive",
        noise_on_ragged="as many as the lengths add up to",
    ),
    *_fault(
        "state in Python",
        "faults",
        counts_its_calls="towers are calls",
        noise_by_numpy="a constant for each tower",
        factor_by_python="a constant for each tower",
        every_other_call="even and odd towers",
    ),
    *_fault(
        "tower-dependent branch",
        "faults",
        reads_its_scope="tower_1",
        reads_its_device="CPU:1",
        seed_by_its_name="a seed made of the scope's name",
    ),
    *_fault(
        "rounding",
        "faults",
        float32_inside="a product over the slice in float32",
        float32_convolution="a convolution in float32",
        quantised="an op that exists in float32 alone",
    ),
    *_fault(
        "added loss",
        "faults",
        added_sum="l2_loss adds up",
        added_divergence="a sum over examples",
    ),
    *_fault(
        "initial weights",
        "faults",
        weights_of_the_system="os.urandom",
        weights_by_numpys_new_generator="default_rng() without a seed",
        projection_that_stays="fixed weights, too",
    ),
    *_refused(
        tensorflow_variable="a tf.Variable is assigned in each tower",
        tensorflow_average="a tf.Variable is assigned in each tower",
        layer_in_call="weights that are new in each call",
        variable_in_call="a tf.Variable that is new in each call",
        two_inputs="one batch of images is all there is",
        named_inputs="one batch of images is all there is",
        integer_logits="without gradient",
        two_outputs="logits alone are needed",
        one_logit="as many logits as classes are needed",
        nothing_to_train="no trainable weights",
        batch_norm_in_cond="towers cannot meet in a branch",
        batch_norm_in_cond_of_features="towers cannot meet in a branch",
    ),
]
