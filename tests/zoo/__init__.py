"""A catalogue of small models as strangers write them, each with the truth about it.

N towers compute what one device computes, or `towers verify` names the one cause why they do not,
or the model is refused. `scripts/catalogue` tries them all; the quick ones are tests.
"""

from dataclasses import replace

from tests.zoo.entry import CAUSES, REFUSED, SAME, Entry, found
from tests.zoo.unsound import UNSOUND

__all__ = ["CAUSES", "ENTRIES", "REFUSED", "SAME", "Entry", "entry", "found", "quick_names"]


def _same(module: str, **whys: str) -> list[Entry]:
    return [Entry(f"{module}:{name}", SAME, why) for name, why in whys.items()]


def _application(name: str, why: str, size: int = 32) -> Entry:
    dataset = f"tests.zoo.applications:images_{size}"
    return Entry(f"applications:{name}", SAME, why, dataset=dataset)


# The tests try these: cheap ones of all kinds.
QUICK = """
convolutions: squeeze_excite
norms: batch_norm_float32
sequences: additive_attention own_cell
draws: fixed_seed without_dtype without_seed
layouts: times_in_rows time_major heads_first flat two_views repeated kernel_of_two_rows
    kernel_of_three_rows pair_of_scales
programs: dropout_in_function dropout_in_cond dropout_in_while dropout_recomputed embedding_twice
    activity_regularizer added_mean float32_head
gradients: shapes_by_batch_size numpy_by_example
state: counters_of_examples counters_of_calls histogram running_range moving_mean last_example
    moving_variance
mixing: minus_mean own_batch_norm keras_mix_up hard_examples divided_by_number mean_gradient
faults: tensorflow_normal tensorflow_generator gamma_draw noise_by_numpy_function
    counter_by_numpy_function square_draw noise_where_positive counts_its_calls every_other_call
    reads_its_scope seed_by_its_name float32_inside quantised added_sum added_divergence
    weights_by_numpys_new_generator projection_that_stays
refused: tensorflow_variable layer_in_call two_inputs integer_logits batch_norm_in_cond
"""


def quick_names() -> set[str]:
    """Return the names that QUICK lists."""
    groups = QUICK.replace("\n    ", " ").strip().splitlines()
    parts = (group.split(": ") for group in groups)
    return {f"{module}:{name}" for module, names in parts for name in names.split()}


_SOUND = [
    *_same(
        "convolutions",
        first_cnn="biases before BatchNorm: their gradients are zero in theory",
        depthwise_separable="depthwise kernels, and BatchNorm between",
        u_net="strides, transposed convolution, a skip",
        dilated="dilated and depthwise-dilated kernels",
        resnext_block="grouped convolution, which Keras compiles by itself on CPUs",
        groups_of_three="the same with three groups, and strides",
        one_dimension="Conv1D: causal, separable, transposed",
        three_dimensions="Conv3D, BatchNorm of five axes",
        poolings="overlapping pooling: gradients add up",
        adaptive_pooling="pooling whose windows are of unlike sizes",
        squeeze_excite="an example's maps weigh each other",
        convnext_block="LayerNorm, LayerScale, whole branches dropped by example",
        dense_block="concatenation, BatchNorm before each convolution",
        inverted_residual="depthwise convolution between BatchNorms, a residual",
        inception_block="branches with BatchNorm without scale",
        padded_and_resized="padding, bilinear resizing, PReLU of each place",
        weight_standardised="moments of a kernel, not of the batch",
        by_tensorflow="TensorFlow's own ops on a Keras weight",
    ),
    *_same(
        "norms",
        batch_norm_ranks="BatchNorm of 2, 3, 4 and 5 axes",
        batch_norm_axes="BatchNorm of an axis that is not the last",
        batch_norm_plain="neither scale nor offset; momentum 0",
        batch_norm_masked="moments over the unmasked alone, unlike in number",
        batch_norm_frozen="statistics stay, nothing is averaged",
        batch_norm_in_inference="called with training=False in training",
        batch_norm_subclass="a layer that inherits from BatchNorm",
        batch_norm_twice="two assignments of one statistic in a step",
        batch_norm_renorm="moments of the batch beside moving ones",
        batch_norm_float32="the layer's own dtype: widened for the comparison",
        batch_norm_after_dropout="draws by example, then moments of all",
        by_example="LayerNorm, GroupNorm, UnitNorm, RMSNorm: one example alone",
        spectral="assigns its kernel and a vector, from weights alone",
        by_hand="moments within an example",
        weight_normalised_head="a constraint acts on the master",
        given_statistics="Normalization with numbers given: fixed weights",
    ),
    Entry("norms:batch_norm_frozen", SAME, "no moments are taken", "--batch_norm=local"),
    Entry("norms:batch_norm_in_inference", SAME, "no moments are taken", "--accumulate_steps=2"),
    Entry("norms:batch_norm_synchronized", SAME, "asks for all towers", "--batch_norm=local"),
    *_same(
        "sequences",
        lstm="masks made once for all times",
        gru="recurrent masks; both kinds of reset",
        simple_rnn_unrolled="no loop in the graph",
        bidirectional="two layers, one of them backwards",
        stacked_cells="cells in a cell, each with masks",
        own_cell="dropout within the loop over times",
        time_distributed="dropout within TimeDistributed: [B * T, ...] or in a loop",
        conv_lstm="masks of maps",
        masked_lstm="times without input, unlike in number",
        multi_head_attention="dropout of weights [B, H, T, T], causal",
        grouped_query_attention="heads that share keys",
        additive_attention="dropout of scores [B, T, T]",
        vision_transformer="class token, dropout on the table of positions, paths dropped",
        mlp_mixer="dropout on a transposed example",
        perceiver="learned queries, one table for all examples",
        fnet="complex numbers",
        rotary="dropout of weights made by einsum",
    ),
    *_same(
        "draws",
        dropouts="each of Keras' noise layers",
        dropout_shared_by_all="one mask for the batch, by noise_shape",
        dropout_of_rows="one mask for all times of an example",
        dropout_used_twice="two draws of one generator in a step",
        flips_and_turns="Keras' geometric augmentation",
        crop="RandomCrop draws one place for the batch",
        colours="Keras' colour augmentation",
        erasing="places [B], and noise of whole images",
        rand_augment="which operations is drawn for the batch, how much by example",
        fixed_seed="the same draw in each step",
        without_dtype="a draw of floatx's type",
        without_seed="Keras' global generator, which is no layer's",
        whole_numbers="integers and a truncated normal from one generator",
        gumbel="a draw within limits, then logarithms",
        reparameterised="five draws an example",
        by_tensorflow="stateless draws by a counter of calls",
        layer_drop="one number for the batch leaves a layer out",
        noisy_experts="noise decides which experts an example gets",
    ),
    Entry("draws:dropouts", SAME, "a part has its own place", "--accumulate_steps=2"),
    Entry("draws:dropout_of_rows", SAME, "a loss scale", "--dtype=mixed_float16"),
    *_same(
        "layouts",
        times_in_rows="[B * T, C]",
        time_major="[T, B, C]",
        time_major_rows="[T * B, C]",
        heads_first="[heads * B, T, T]",
        heads_last="[B * heads, T, T]",
        windows="[B * windows, 9, 9]",
        flat="[B * T * C]",
        features_first="[C, B]",
        two_views="[2 * B, C], one copy of the batch after the other",
        repeated="[B * 2, C], an example's copies side by side",
        one_more_axis="[1, B, T, C]",
        kernel_of_two_rows="[2, 5] for all, as long as a slice",
        kernel_of_three_rows="[3, 5] for all, as long as a slice",
        kernel_of_four_rows="[4, 5] for all, as long as a slice",
        kernel_of_seven_rows="[7, 5] for all, as long as the batch",
        drop_connect="[4, 3] and [3, 4], masks of weights",
        noisy_positions="[2, 4], noise on a table of positions",
        pair_of_scales="[2], then [B, 1] from the same generator",
        random_projections="[4, C, C] for all",
    ),
    *_same(
        "programs",
        dropout_in_function="a tf.function that is traced for one tower",
        dropout_in_cond="a seed is assigned in a branch",
        dropout_in_while="a seed is assigned in a loop",
        dropout_in_scan="a seed is assigned at each time",
        loop_and_branch="keras.ops' loop and branch, with weights in them",
        loop_by_example="a loop whose end no example decides for others",
        remat="layers that are computed again for the gradient",
        dropout_recomputed="the mask must be the same the second time",
        batch_norm_recomputed="moments of all towers, taken twice",
        mapped_over_examples="vectorized_map and map",
        embedding_twice="sparse gradients of two look-ups",
        tied_embedding="a sparse and a dense gradient of one table",
        shared_layers="an encoder with BatchNorm that is used twice",
        nested_models="a model within a model, used twice",
        subclassed="a model without a graph of layers",
        penalised_weights="regularizers act once, on the masters",
        activity_regularizer="Keras divides it by the number of examples",
        added_mean="add_loss of a mean over examples",
        added_penalty="add_loss of what no example enters",
        float32_head="layers with a dtype of their own",
        fixed_features="constants by NumPy's seed, a tf.Variable that stays",
        weights_by_tensorflows_seed="initial weights that the seed determines",
    ),
    Entry("programs:embedding_twice", SAME, "sharded masters", "--variables=sharded"),
    Entry("programs:tied_embedding", SAME, "a copy on each tower", "--variables=replicated"),
    Entry("programs:penalised_weights", SAME, "decay, too", "--optimizer=adamw --weight_decay=0.1"),
    *_same(
        "gradients",
        no_gradient="None for a weight",
        stopped="a branch without gradient",
        straight_through="rounding that the gradient does not see",
        custom_gradient="gradients by hand",
        custom_gradient_of_weight="a weight's gradient by hand",
        hyper_network="a kernel for each example",
        gradient_in_the_model="a gradient of a gradient",
        shapes_by_batch_size="the number of examples in shapes alone",
        numpy_by_example="Python code, but nothing that towers change",
        top_places="sorting within an example",
    ),
    *_same(
        "state",
        counters_of_examples="added up over towers; read before",
        counters_of_calls="one more each step, not each tower",
        histogram="integers that are added up",
        running_range="the largest and smallest of all towers",
        moving_mean="the mean of the towers, by examples",
        float_sums="sums of floats are added up",
        given_policies="aggregation says how",
        constant_state="does not depend on the batch",
        average_of_weights="does not depend on the batch",
        growing_noise="state and draws together",
    ),
    Entry("refused:batch_norm_beside_cond", SAME, "the branch has no BatchNorm in it"),
    _application("mobilenet", "depthwise convolutions"),
    _application("mobilenet_v2", "inverted residuals"),
    _application("mobilenet_v3_small", "squeeze and excite"),
    _application("efficientnet_b0", "whole branches dropped by example"),
    _application("efficientnet_v2_b0", "fused blocks"),
    _application("resnet50_v2", "deep, BatchNorm before each convolution"),
    _application("densenet121", "121 BatchNorms"),
    _application("convnext_tiny", "LayerNorm and LayerScale"),
    _application("nasnet_mobile", "two thousand layers"),
    _application("xception", "separable convolutions", 75),
    _application("inception_v3", "BatchNorm without scale", 75),
    _application("vgg11", "dropout on features"),
]

ENTRIES = [replace(entry, quick=entry.name in quick_names()) for entry in [*_SOUND, *UNSOUND]]
