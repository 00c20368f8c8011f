"""Who earned the reward? The advantage of every turn, by different answers to this question.

An episode of a group has n turns: in the state s_k the policy takes the action a_k and earns r_k, k = 0..n-1. Written

    R = sum of r_k, the return      G_k = r_k + gamma G_k+1, the reward to go      N(x) = (x - mean) / (std + eps)

`--credit` chooses; the functions below explain. What their means run over differs: the episodes of a group, all of its
turns, or those that begin in the same state. AdamW hardly notices how large advantages are, but it does notice how
large they are beside one another: methods whose differences are values of states, and so have their own scale, are
divided by the root mean square of the whole step, and the others are normalised in each group.

States are compared as the environment's `state()` gives them, or by its observations if it has none.
"""

from collections import Counter, defaultdict
from statistics import correlation, fmean, stdev
from typing import Literal

import torch
from exact_advantages import exact_advantages

from common.advantages import STD_EPS
from common.episode import Episode
from common.errors import UserError
from common.parallel import gather, gather_rows
from common.policy import Policy
from common.trajectory import Trajectory

Credit = Literal["episode", "reward_to_go", "gigpo", "action_mean", "walked_graph", "progress", "potential", "exact"]
CLEAR = 0.02  # in units of reward
Turns = list[list[float]]  # one number for each turn of each episode


def credit_turns(config, policy: Policy, trajectories: list[Trajectory]) -> None:
    """Give each episode the advantages of its turns, and with `--log-exact` the exact ones."""
    for row, advantages in zip(trajectories, turn_advantages(config, policy, trajectories), strict=True):
        row.episode.advantages = advantages
    if config.log_exact:
        for row, advantages in zip(trajectories, exact_advantages(policy, trajectories), strict=True):
            row.episode.exact = advantages


def check_credit(config, world) -> None:
    """Refuse a credit that needs what this environment has not, before a model is loaded."""
    if config.credit in ("progress", "potential") and not world.has_potential:
        raise UserError(f"--credit {config.credit}: {world} defines no method potential()")
    if "exact" in (config.credit, config.log_exact and "exact") and world.name != "thin_ice":
        flag = "--credit exact" if config.credit == "exact" else "--log-exact"
        raise UserError(f"{flag}: exact advantages can be computed in the bundled world only, thin_ice, not in {world}")


def turn_advantages(config, policy: Policy, trajectories: list[Trajectory]) -> Turns:
    """The advantages of all turns of B episodes, a group's G adjacent; exactly 0 where nothing can be compared."""
    episodes, gamma, advantages = [row.episode for row in trajectories], config.turn_discount, []
    if config.credit == "exact":
        return unit_root_mean_square(exact_advantages(policy, trajectories))
    for start in range(0, len(episodes), config.group_size):
        group = episodes[start : start + config.group_size]
        match config.credit:
            case "episode":
                advantages += of_episodes(group)
            case "reward_to_go":
                advantages += normalise(rewards_to_go(group, gamma))
            case "gigpo":
                advantages += gigpo(group, gamma)
            case "action_mean":
                advantages += action_means(group, gamma)
            case "walked_graph":
                advantages += walked_graph(group, gamma)
            case "progress":
                advantages += normalise(rewards_to_go(group, gamma, progress_rewards(group, config.process_weight)))
            case "potential":
                shaped = potential_rewards(group, config.process_weight, gamma)
                advantages += normalise(rewards_to_go(group, gamma, shaped))
    return unit_root_mean_square(advantages) if config.credit in ("action_mean", "walked_graph") else advantages


def of_episodes(group: list[Episode]) -> Turns:
    """GRPO: A_k = N(R) over the group, the same for all turns (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    [advantages] = normalise([[sum(episode.rewards) for episode in group]])
    return [[one] * episode.num_turns for one, episode in zip(advantages, group, strict=True)]


def rewards_to_go(group: list[Episode], gamma: float, rewards: Turns | None = None) -> Turns:
    """G_k = r_k + gamma G_k+1, of the environment's rewards or of others. `--credit reward_to_go`: N(G) over all turns.

    A turn is not blamed for what was earned before it; with gamma below 1, a long way to the reward is worth less.
    """
    found = []
    for own in [episode.rewards for episode in group] if rewards is None else rewards:
        to_go = [0.0]
        for reward in reversed(own):
            to_go.append(reward + gamma * to_go[-1])
        found.append(to_go[:0:-1])
    return found


def gigpo(group: list[Episode], gamma: float) -> Turns:
    """GiGPO: A_k = N(R) over the episodes + N(G_k) over the turns of the group that begin in the same state s_k.

    Feng et al. 2025, arXiv 2505.10978, equations 3 to 8, with weight 1 and the standard deviation as normalisation (the
    paper also proposes none). Their code, verl-agent, takes the observation for the state. By default it divides by no
    standard deviation, and its mean return is over turns, so that a long episode counts more often.
    """
    to_go, visits, both = rewards_to_go(group, gamma), defaultdict(list), of_episodes(group)
    for number, episode in enumerate(group):
        for turn, state in enumerate(episode.states):
            visits[state].append((number, turn))
    for places in visits.values():
        [steps] = normalise([[to_go[number][turn] for number, turn in places]])
        for (number, turn), advantage in zip(places, steps, strict=True):
            both[number][turn] += advantage
    return both


def action_means(group: list[Episode], gamma: float) -> Turns:
    """A_k = mean of G over the turns with (s_k, a_k) - mean of G over the turns with s_k: Q - V, from the visits.

    Turns that did the same in the same place share their luck, as in every-visit Monte Carlo (Sutton and Barto 2018,
    section 5.1): GiGPO gives each its own G_k.
    """
    of_state, of_action = defaultdict(list), defaultdict(list)
    to_go = rewards_to_go(group, gamma)
    for episode, values in zip(group, to_go, strict=True):
        for state, action, value in zip(episode.states, episode.actions, values, strict=True):
            of_state[state].append(value)
            of_action[state, action].append(value)
    return [
        [
            fmean(of_action[pair]) - fmean(of_state[pair[0]])
            for pair in zip(episode.states, episode.actions, strict=True)
        ]
        for episode in group
    ]


def walked_graph(group: list[Episode], gamma: float) -> Turns:
    """A_k = r_k + gamma V(s_k+1) - V(s_k), temporal differences on the graph that the group has walked.

        V(s) = mean of r_k + gamma V(s_k+1) over the group's turns with s_k = s        (0 after an episode's last turn)

    The solution is the value of the policy in a world that does what it did in these visits: batch TD(0) (Sutton and
    Barto 2018, section 6.3). One episode's success thereby reaches others that met it on its way.
    """
    place = {state: number for number, state in enumerate(dict.fromkeys(s for one in group for s in one.states))}
    equations, rewards = torch.zeros(len(place), len(place)).double(), torch.zeros(len(place), 1).double()
    visits = Counter(state for episode in group for state in episode.states)
    for episode in group:
        for state, reward, after in zip(episode.states, episode.rewards, [*episode.states[1:], None], strict=True):
            rewards[place[state]] += reward / visits[state]
            if after is not None:
                equations[place[state], place[after]] -= gamma / visits[state]
    solved = torch.linalg.solve(torch.eye(len(place)).double() + equations, rewards)[:, 0].tolist()
    values = [[solved[place[state]] for state in episode.states] for episode in group]
    return [
        [reward + gamma * then - now for reward, now, then in zip(one.rewards, own, [*own[1:], 0.0], strict=True)]
        for one, own in zip(group, values, strict=True)
    ]


def progress_rewards(group: list[Episode], weight: float) -> Turns:
    """r_k + weight, if the potential rises in turn k: a process reward that pays steps forward and fines none back.

    So a circle pays: a step back and a step forward earn `weight` again and again, and the farm is worth more than the
    goal once the budget of turns allows it (Randløv and Alstrøm 1998, whose bicycle drove in circles).
    """
    shaped = []
    for episode in group:
        rises = [after > before for before, after in zip(*known_potentials(episode), strict=True)]
        shaped.append([reward + weight * rise for reward, rise in zip(episode.rewards, rises, strict=True)])
    return shaped


def potential_rewards(group: list[Episode], weight: float, gamma: float) -> Turns:
    """r_k + gamma Phi(s_k+1) - Phi(s_k), with Phi = weight * potential, and Phi = 0 after an episode's last turn.

    Ng, Harada and Russell 1999: the best policy stays the best one, and no circle pays, since the terms telescope: the
    reward to go becomes G_k - Phi(s_k). Potential-based shaping is a baseline for each state, and nothing else.
    """
    shaped = []
    for episode in group:
        before, after = known_potentials(episode)
        after[-1:] = [0.0] if after else []
        moves = [weight * (gamma * then - now) for now, then in zip(before, after, strict=True)]
        shaped.append([reward + move for reward, move in zip(episode.rewards, moves, strict=True)])
    return shaped


def known_potentials(episode: Episode) -> tuple[list[float], list[float]]:
    """The potentials before and after each turn."""
    return episode.potentials[:-1], episode.potentials[1:]


def agreement(episodes: list[Episode]) -> dict[str, float]:
    """How the advantages of all turns agree with the exact ones, if these are known: correlation, and share of signs.

    Signs are those of turns that got any credit and that matter: an exact advantage of at least CLEAR.
    """
    turns = [pair for one in episodes if one.exact for pair in zip(one.advantages, one.exact, strict=True)]
    pairs = gather_rows(turns)
    clear = [(given > 0) == (exact > 0) for given, exact in pairs if given and abs(exact) >= CLEAR]
    if len(pairs) < 2 or not clear or min(map(len, map(set, zip(*pairs, strict=True)))) < 2:
        return {}
    return {"credit/correlation": correlation(*zip(*pairs, strict=True)), "credit/right_sign": fmean(clear)}


def normalise(values: Turns) -> Turns:
    """(x - mean) / (std + STD_EPS) over all numbers; exactly 0 if they are equal."""
    flat = [value for row in values for value in row]
    if len(flat) < 2 or max(flat) - min(flat) <= 1e-6 * max(1.0, *map(abs, flat)):
        return [[0.0] * len(row) for row in values]
    center, spread = fmean(flat), stdev(flat) + STD_EPS
    return [[(value - center) / spread for value in row] for row in values]


def unit_root_mean_square(values: Turns) -> Turns:
    """Divided by the root mean square over all turns of the step, of all processes; 0 if all are 0."""
    squares = sum(gather(sum(value**2 for row in values for value in row)))
    count = sum(gather(sum(map(len, values))))
    scale = (squares / max(count, 1)) ** 0.5
    return [[value / scale if scale > 1e-6 else 0.0 for value in row] for row in values]
