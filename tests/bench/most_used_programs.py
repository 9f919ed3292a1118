"""Programs that stand for those that people run: small, on a CPU, each with its own kind of model and optimizer."""

from tests.bench import most_used_language as language
from tests.bench import most_used_others as others
from tests.bench import most_used_vision as vision

PROGRAMS = (
    language.gpt_adamw_foreach,
    language.gpt_adamw_fused,
    language.gpt_adam_for_loop,
    language.gpt_autocast,
    language.llama_training,
    language.llama_padded_training,
    language.sampling,
    others.mixture_of_experts,
    others.mixture_by_sorting,
    vision.resnet,
    vision.mobile_net,
    vision.diffusion,
    vision.autoencoder,
    vision.vision_transformer,
    language.translation,
    language.lstm,
    language.gated_recurrence,
    language.state_space,
    others.recommender,
    others.contrastive,
    others.losses,
    vision.detection,
    others.graph_network,
    vision.speech,
    others.policy_gradient,
    language.low_rank_adapters,
    language.quantised_inference,
    others.second_order,
)
