"""The geometry of routing: where a router's output is discontinuous, how near that is, and when a random walk gets there."""

from holdfast.geometry.affine import AffineKeys as AffineKeys
from holdfast.geometry.affine import NoGeometry as NoGeometry
from holdfast.geometry.affine import affine_keys as affine_keys
from holdfast.geometry.affine import affine_order as affine_order
from holdfast.geometry.diffusion import HittingBounds as HittingBounds
from holdfast.geometry.diffusion import Walks as Walks
from holdfast.geometry.diffusion import hitting_bounds as hitting_bounds
from holdfast.geometry.diffusion import simulate_walks as simulate_walks
from holdfast.geometry.thickening import SliceDensity as SliceDensity
from holdfast.geometry.thickening import Thickening as Thickening
from holdfast.geometry.thickening import ball_radius as ball_radius
from holdfast.geometry.thickening import extra_experts_law as extra_experts_law
from holdfast.geometry.thickening import slice_densities as slice_densities
from holdfast.geometry.thickening import thickening_share as thickening_share
from holdfast.geometry.ties import Ties as Ties
from holdfast.geometry.ties import nearest_ties as nearest_ties
from holdfast.geometry.ties import tie_points as tie_points
