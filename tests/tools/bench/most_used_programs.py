"""Programs that stand for those that people run: small, on a CPU, each with its own kind of model and optimizer."""

from tests.tools.bench import most_used_language, most_used_others, most_used_vision

PROGRAMS = (
    most_used_language.gpt_adamw_foreach,
    most_used_language.gpt_adamw_fused,
    most_used_language.gpt_adam_for_loop,
    most_used_language.gpt_autocast,
    most_used_language.llama_training,
    most_used_language.llama_padded_training,
    most_used_language.sampling,
    most_used_others.mixture_of_experts,
    most_used_others.mixture_by_sorting,
    most_used_vision.resnet,
    most_used_vision.mobile_net,
    most_used_vision.diffusion,
    most_used_vision.autoencoder,
    most_used_vision.vision_transformer,
    most_used_language.translation,
    most_used_language.lstm,
    most_used_language.gated_recurrence,
    most_used_language.state_space,
    most_used_others.recommender,
    most_used_others.contrastive,
    most_used_others.losses,
    most_used_vision.detection,
    most_used_others.graph_network,
    most_used_vision.speech,
    most_used_others.policy_gradient,
    most_used_language.low_rank_adapters,
    most_used_language.quantised_inference,
    most_used_others.second_order,
)
