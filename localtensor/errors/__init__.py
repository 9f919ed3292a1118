"""Every refusal, one class each, built from the facts of the case.  This is their door; the rooms, bottom up:

base                       what an error is, and the five parts of its message
arguments                  what a caller writes: placements, meshes, dims
collectives, processes     what ranks bring to a collective; pools of real processes
faults                     what all faults of a user's program share
mismatches, programs       calls that do not fit; what a real run would not tell
runs                       what `run` cannot do
lockstep                   what one control flow for all ranks cannot do
explorations               what cannot be explored, order by order
"""

from localtensor.errors.arguments import BadMesh as BadMesh
from localtensor.errors.arguments import BadPlacement as BadPlacement
from localtensor.errors.arguments import BadShardOrder as BadShardOrder
from localtensor.errors.arguments import NoSuchDim as NoSuchDim
from localtensor.errors.arguments import NotReducible as NotReducible
from localtensor.errors.arguments import OtherRows as OtherRows
from localtensor.errors.arguments import WrongPieces as WrongPieces
from localtensor.errors.arguments import WrongShape as WrongShape
from localtensor.errors.base import LocalTensorError as LocalTensorError
from localtensor.errors.base import refusal as refusal
from localtensor.errors.collectives import ComplexNotGathered as ComplexNotGathered
from localtensor.errors.collectives import DevicesDiffer as DevicesDiffer
from localtensor.errors.collectives import DtypeNotCarried as DtypeNotCarried
from localtensor.errors.collectives import DtypeNotReducible as DtypeNotReducible
from localtensor.errors.collectives import DtypesDiffer as DtypesDiffer
from localtensor.errors.collectives import ListFromNonRoot as ListFromNonRoot
from localtensor.errors.collectives import ListsDiffer as ListsDiffer
from localtensor.errors.collectives import NegativeSplit as NegativeSplit
from localtensor.errors.collectives import NegativeTag as NegativeTag
from localtensor.errors.collectives import NotAPermutation as NotAPermutation
from localtensor.errors.collectives import NotContiguous as NotContiguous
from localtensor.errors.collectives import NotDense as NotDense
from localtensor.errors.collectives import NothingToReduce as NothingToReduce
from localtensor.errors.collectives import NotOnePerRank as NotOnePerRank
from localtensor.errors.collectives import RankOutside as RankOutside
from localtensor.errors.collectives import ScalarTensor as ScalarTensor
from localtensor.errors.collectives import SelfSend as SelfSend
from localtensor.errors.collectives import ShapesDiffer as ShapesDiffer
from localtensor.errors.collectives import SplitCount as SplitCount
from localtensor.errors.collectives import SplitsDisagree as SplitsDisagree
from localtensor.errors.collectives import SplitSum as SplitSum
from localtensor.errors.collectives import TwoSenders as TwoSenders
from localtensor.errors.collectives import UnevenDim as UnevenDim
from localtensor.errors.collectives import UnknownReduction as UnknownReduction
from localtensor.errors.collectives import WrongListLength as WrongListLength
from localtensor.errors.exploration import BadExploration as BadExploration
from localtensor.errors.exploration import BadProgram as BadProgram
from localtensor.errors.exploration import WaitsAlone as WaitsAlone
from localtensor.errors.formatting import ProgramFault as ProgramFault
from localtensor.errors.lockstep import AnotherMode as AnotherMode
from localtensor.errors.lockstep import ModeBusy as ModeBusy
from localtensor.errors.lockstep import NoMode as NoMode
from localtensor.errors.lockstep import NotATensor as NotATensor
from localtensor.errors.lockstep import NotHeld as NotHeld
from localtensor.errors.lockstep import NotInLockstep as NotInLockstep
from localtensor.errors.lockstep import OutsideWrite as OutsideWrite
from localtensor.errors.lockstep import RanksDiverge as RanksDiverge
from localtensor.errors.lockstep import ValuesDiffer as ValuesDiffer
from localtensor.errors.mismatches import CollectiveMismatch as CollectiveMismatch
from localtensor.errors.mismatches import DeviceMismatch as DeviceMismatch
from localtensor.errors.mismatches import DtypeMismatch as DtypeMismatch
from localtensor.errors.mismatches import GroupMismatch as GroupMismatch
from localtensor.errors.mismatches import KindMismatch as KindMismatch
from localtensor.errors.mismatches import LayoutMismatch as LayoutMismatch
from localtensor.errors.mismatches import LengthMismatch as LengthMismatch
from localtensor.errors.mismatches import MessageMismatch as MessageMismatch
from localtensor.errors.mismatches import ReduceOpMismatch as ReduceOpMismatch
from localtensor.errors.mismatches import RootMismatch as RootMismatch
from localtensor.errors.mismatches import ShapeMismatch as ShapeMismatch
from localtensor.errors.mismatches import SplitMismatch as SplitMismatch
from localtensor.errors.processes import NoRanks as NoRanks
from localtensor.errors.processes import NoSuchBackend as NoSuchBackend
from localtensor.errors.processes import NoTime as NoTime
from localtensor.errors.processes import NotImportable as NotImportable
from localtensor.errors.processes import NotSendable as NotSendable
from localtensor.errors.processes import PoolClosed as PoolClosed
from localtensor.errors.processes import PoolDidNotStart as PoolDidNotStart
from localtensor.errors.processes import WrongArguments as WrongArguments
from localtensor.errors.programs import BufferReused as BufferReused
from localtensor.errors.programs import CollectiveFailed as CollectiveFailed
from localtensor.errors.programs import Deadlock as Deadlock
from localtensor.errors.programs import EarlyReturn as EarlyReturn
from localtensor.errors.programs import GroupsLeftOver as GroupsLeftOver
from localtensor.errors.programs import MessagesLeftOver as MessagesLeftOver
from localtensor.errors.programs import RankRaised as RankRaised
from localtensor.errors.programs import RanksDisagree as RanksDisagree
from localtensor.errors.programs import ReadBeforeWait as ReadBeforeWait
from localtensor.errors.programs import WorkNotWaited as WorkNotWaited
from localtensor.errors.runs import BadGroup as BadGroup
from localtensor.errors.runs import BadSchedule as BadSchedule
from localtensor.errors.runs import ForeignThread as ForeignThread
from localtensor.errors.runs import NestedRun as NestedRun
from localtensor.errors.runs import NeverEnded as NeverEnded
from localtensor.errors.runs import NoSuchScript as NoSuchScript
from localtensor.errors.runs import NotCallableWith as NotCallableWith
from localtensor.errors.runs import NotCopyable as NotCopyable
from localtensor.errors.runs import NotServed as NotServed
from localtensor.errors.runs import PiecesDiffer as PiecesDiffer
from localtensor.errors.runs import ReplayDiverged as ReplayDiverged
from localtensor.errors.runs import ScriptFailed as ScriptFailed
from localtensor.errors.runs import ThreadsOnly as ThreadsOnly
from localtensor.errors.runs import TooFewGpus as TooFewGpus
from localtensor.errors.runs import TorchChanged as TorchChanged
from localtensor.errors.runs import UnknownWay as UnknownWay

__all__ = [
    "AnotherMode", "BadExploration", "BadGroup", "BadMesh", "BadPlacement", "BadProgram", "BadSchedule",
    "BadShardOrder", "BufferReused",
    "CollectiveFailed", "CollectiveMismatch", "ComplexNotGathered", "Deadlock", "DeviceMismatch", "DevicesDiffer",
    "DtypeMismatch", "DtypeNotCarried", "DtypeNotReducible", "DtypesDiffer", "EarlyReturn", "ForeignThread",
    "GroupMismatch", "GroupsLeftOver", "KindMismatch", "LayoutMismatch", "LengthMismatch", "ListFromNonRoot",
    "ListsDiffer", "LocalTensorError", "MessageMismatch", "MessagesLeftOver", "ModeBusy", "NegativeSplit",
    "NegativeTag", "NestedRun", "NeverEnded", "NoMode", "NoRanks", "NoSuchBackend", "NoSuchDim", "NoSuchScript", "NoTime",
    "NotAPermutation", "NotATensor", "NotCallableWith", "NotContiguous", "NotCopyable", "NotDense", "NotHeld", "NotImportable",
    "NotInLockstep", "NotOnePerRank", "NotReducible", "NotSendable", "NotServed", "NothingToReduce", "OtherRows",
    "OutsideWrite",
    "PiecesDiffer", "PoolClosed", "PoolDidNotStart", "ProgramFault", "RankOutside", "RankRaised", "RanksDisagree",
    "RanksDiverge", "ReadBeforeWait", "ReduceOpMismatch", "ReplayDiverged", "RootMismatch", "ScalarTensor",
    "ScriptFailed", "SelfSend", "ShapeMismatch", "ShapesDiffer", "SplitCount", "SplitMismatch", "SplitSum",
    "SplitsDisagree", "ThreadsOnly", "TooFewGpus", "TorchChanged", "TwoSenders", "UnevenDim", "UnknownReduction",
    "UnknownWay", "ValuesDiffer", "WaitsAlone", "WorkNotWaited", "WrongArguments", "WrongListLength", "WrongPieces",
    "WrongShape",
    "refusal",
]  # fmt: skip
